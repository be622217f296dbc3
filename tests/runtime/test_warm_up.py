"""runtime/warm_up.py: buckets start in one order on all ranks, share the memory of the largest, and are left out together."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support import ranks, tiny

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.ascend.emulator.device import open_device
from npucompile.runtime import device_executor
from npucompile.runtime.device_executor import DeviceExecutor
from npucompile.runtime.warm_up import LIMIT_S, WarmUp, in_order
from npucompile.tools.builder import driver, pool
from npucompile.tools.ranks.weights import rank_params

SIZES = tuple(range(1, 33))


@pytest.fixture(scope="module")
def artifact(request, npu_artifact, tmp_path_factory):
    """One of two decode buckets; or of the 32 that a server of the role decode starts."""
    if getattr(request, "param", 2) == 2:
        return Artifact.open(npu_artifact(""))
    root = tmp_path_factory.mktemp("decoding")
    checkpoint = tiny.write_checkpoint(
        root / "checkpoint", **{**ranks.NPU_SIZES, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    )
    plan = tiny.planned_device(checkpoint, mesh="", buckets=SIZES, max_model_len=128, max_num_seqs=32, num_speculative_tokens=0)
    with mock.patch.object(pool, "run", tiny.compile_once):
        driver.build(plan, root / "out", root / "cache", tiny.QUIET, jobs=1)
    return Artifact.open(root / "out")


def only(artifact: Artifact, buckets: list[Bucket]) -> Artifact:
    artifact = copy.copy(artifact)
    artifact.manifest = replace(artifact.manifest, graphs=tuple(entry for entry in artifact.manifest.graphs if entry.bucket in buckets))
    return artifact


def started(artifact: Artifact, limit_bytes: int | None = None, **options: Any) -> tuple[DeviceExecutor, list[int]]:
    """An executor on an emulated device with so much memory for graphs, and the blocks that they have taken."""
    device = open_device(0)
    device._state.feature_maps.limit_bytes = limit_bytes

    def load(wanted: Any) -> Any:
        return rank_params(artifact, 0, checkpoint=None, wanted=wanted, progress=tiny.QUIET)

    try:
        return DeviceExecutor(artifact, device, load, **options), device._state.feature_maps.blocks
    except BaseException:
        device.close()
        raise


def feature_maps(executor: DeviceExecutor) -> dict[Bucket, int]:
    return {bucket: executable._graph._program.feature_map_bytes for bucket, executable in executor._executables.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("artifact", [2, pytest.param(len(SIZES), marks=pytest.mark.long)], indirect=True)
def test_buckets_take_the_memory_of_the_largest_and_smallest_first_would_take_the_sum(artifact, monkeypatch):
    decoding = only(artifact, [entry.bucket for entry in artifact.manifest.graphs if entry.bucket.kind == "decode"])
    executor, blocks = started(decoding)
    with closing(executor):
        sizes = feature_maps(executor)
        assert max(sizes.values()) <= sum(blocks) <= 1.05 * max(sizes.values())
        assert executor.device.used_bytes() == sum(blocks)
    monkeypatch.setattr(device_executor, "in_order", lambda entries: in_order(entries)[::-1])
    executor, blocks = started(decoding)
    executor.close()
    assert sum(blocks) == sum(sizes.values())


def test_a_bucket_that_finds_no_memory_is_left_out(artifact, caplog):
    executor, _ = started(artifact)
    executor.close()
    sizes = feature_maps(executor)
    largest = max(sizes, key=sizes.__getitem__)
    executor, _ = started(artifact, sizes[largest] - 1)
    executor.close()
    assert set(executor.buckets) == {*sizes} - {largest}
    assert executor.missing[largest].startswith(f"a step on emulated:0 failed: NPU out of memory. Tried to allocate {sizes[largest]} bytes")
    assert f"{largest.name} cannot be compiled or run" in caplog.text
    with pytest.raises(LoweringError, match="no decode bucket can run, and serving needs at least one: decode-b1-q2: a step on emulated:0"):
        started(artifact, 1)


def test_no_bucket_runs_for_the_first_time_in_a_step_that_is_served(artifact):
    executor, _ = started(artifact)
    with closing(executor):
        executor.device.record().wait()
        assert not any(pool.cpu().any() for pool in executor.state.values()), "padding has left a trace"
        bucket = executor.buckets[0]
        entry = next(entry for entry in artifact.manifest.graphs if entry.bucket == bucket)
        cold = executor.device.open(artifact.path / entry.compiled.file, 0, {})
        cold.compile(executor._operands[bucket])
        with pytest.raises(LoweringError, match="runs for the first time in a step that is served"):
            cold(executor._operands[bucket])


def test_ranks_wait_for_the_weights_of_others_before_limits_begin(artifact):
    rounds = []
    executor, _ = started(artifact, step_timeout_s=0.5, agree=lambda reason, limit_s: rounds.append(limit_s) or reason)
    executor.close()
    assert rounds == [None, *[LIMIT_S, None, LIMIT_S] * len(executor.buckets)]


class Executable:
    """Writes down what is done, and fails where it is told to."""

    def __init__(self, log: list[str], fails: str = "") -> None:
        self.log, self.fails = log, fails

    def _do(self, what: str) -> bool:
        self.log.append(what)
        if what == self.fails:
            raise LoweringError(f"{what} failed")
        return True

    def warm_up(self, operands: Any) -> None:
        self._do("warm up")

    def compile(self, operands: Any, cache_dir: Any) -> bool:
        return self._do("compile")

    def __call__(self, operands: Any) -> list[Any]:
        self._do("run")
        return []


def outcome(fails: str, others_fail: str, collectives: bool) -> tuple[str, list[str]]:
    log: list[str] = []

    def agree(reason: str, limit_s: float | None) -> str:
        did = log[-1]
        log.append(f"agree {limit_s}")
        return f"rank 0: {reason}" if reason else f"rank 1: no {did}" if did == others_fail else ""

    event = SimpleNamespace(wait=lambda limit_s: log.append(f"wait {limit_s}"))
    device: Any = SimpleNamespace(used_bytes=lambda: 0, record=lambda: event)
    entry: Any = SimpleNamespace(bucket=Bucket("decode", 1, 2), collectives=(("all_reduce", "tp", ""),) * collectives)
    executable: Any = Executable(log, fails)
    return WarmUp(device, agree, None, 7.0).start(entry, executable, []), log


def test_ranks_agree_behind_each_part_before_any_waits_for_the_device():
    each = ["agree 7.0", "wait 7.0"]
    assert outcome("", "", True) == ("compiled", ["warm up", *each, "compile", "agree None", "wait 7.0", "run", *each])


@pytest.mark.parametrize("collectives", [True, False])
def test_what_one_rank_cannot_is_left_out_on_all_or_ends_the_start_where_others_would_wait(collectives):
    for what in ("warm up", "compile", "run"):
        assert outcome(what, "", collectives)[0] == f"rank 0: {what} failed"
    # Nothing is queued by a compiler.
    assert outcome("", "compile", collectives)[0] == "rank 1: no compile"
    for what in ("warm up", "run"):
        if collectives:
            with pytest.raises(LoweringError, match=f"decode-b1-q2: rank 1: no {what}; on this rank the step waits for that one"):
                outcome("", what, collectives)
        else:
            assert outcome("", what, collectives)[0] == f"rank 1: no {what}"
