"""tools/prove/bringup/rungs.py: a fault of a device is found by the rung that is about it, and named by the assumption that it refutes."""

from __future__ import annotations

import os

import pytest
from support import faulty, tiny
from support.faulty import FaultyDevice, FaultyExecutable, lost_writes, right, wrong_results

from npucompile.graphs.errors import LoweringError
from npucompile.tools.prove.bringup import layers, rungs
from npucompile.tools.prove.bringup.rungs import RUNGS, Bringup
from npucompile.tools.ranks import executors
from npucompile.tools.ranks.rank_settings import RankSettings


def is_whole(executable: FaultyExecutable) -> bool:
    return len(executable.types) > 500


def is_layer(executable: FaultyExecutable) -> bool:
    return 20 < len(executable.types) < 500


def is_alone(kind: str):
    return lambda executable: executable.types == [kind]


def loses_a_pool_between_decode_buckets(executable: FaultyExecutable, operands):
    """The wrong thing happens only where one decode bucket runs straight after the other."""
    last, decodes = executable.device.last, ("RecurrentGatedDeltaRule" in executable.types and is_whole(executable))
    if decodes and last is not None and last is not executable and "RecurrentGatedDeltaRule" in last.types and is_whole(last):
        for operand in executable.ge_file.bound:
            operands[operand].zero_()
    return right(executable, operands)


@pytest.fixture
def bringup(npu_artifact, monkeypatch):
    monkeypatch.setattr(layers, "STEPS", 2)

    def run(on_run=right, wanted=RUNGS):
        for module in (rungs, executors):
            monkeypatch.setattr(module, "open_device", lambda kind, index=0: FaultyDevice(on_run, index=index))
        planned = {name: setting.value for name, setting in npu_artifact.manifest.environment.items()}
        ladder = Bringup(npu_artifact, RankSettings(device="emulated"), planned, tiny.QUIET, wanted=wanted)
        ladder.run()
        return ladder.results

    return run


def test_a_device_without_a_fault_passes_every_rung_with_times_beside_estimates(bringup):
    results = bringup()
    assert [(result.name, result.passed) for result in results] == [(name, True) for name in RUNGS]
    by_name = {result.name: result for result in results}
    assert by_name["operators"].facts["run"] == len(by_name["operators"].timings) > 100
    assert by_name["operators"].facts["run"] + len(by_name["operators"].left_out) == by_name["operators"].facts["distinct"]
    assert all(timing.estimate_s and timing.seconds > 0 for name in ("operators", "layers", "buckets") for timing in by_name[name].timings)
    assert {timing.what for timing in by_name["buckets"].timings} == {"prefill-b1-q4", "decode-b2-q2", "decode-b4-q2"}
    assert by_name["buckets"].facts["rows"] > 10
    assert by_name["alternation"].facts["rows"] > 10
    assert (
        by_name["buckets"].facts["other_tokens"] == by_name["alternation"].facts["other_tokens"] == by_name["serve"].facts["compiles"] == 0
    )


@pytest.mark.parametrize(
    ("on_run", "rung", "assumptions", "what"),
    [
        (wrong_results(is_alone("FusedInferAttentionScore")), "operators", {"lengths"}, "FusedInferAttentionScore"),
        (wrong_results(is_layer), "layers", {"write-after-read"}, "layer00_prologue"),
        (wrong_results(is_whole), "buckets", {"one-session"}, "prefill-b1-q4"),
        (lost_writes(is_whole), "buckets", {"one-session", "write-after-read"}, "b"),
        (loses_a_pool_between_decode_buckets, "alternation", {"alternation"}, "all buckets in turns"),
    ],
    ids=["operator", "layer", "bucket", "bucket's state", "alternation"],
)
def test_a_fault_is_found_by_its_rung_which_is_the_last(bringup, on_run, rung, assumptions, what):
    results = bringup(on_run, wanted=(rung, *RUNGS[RUNGS.index(rung) + 1 :]))
    assert [(result.name, result.passed) for result in results if not result.passed] == [(rung, False)]
    assert results[-1].name == rung
    failure = results[-1].failures[0]
    assert failure.assumption in assumptions
    assert what in failure.what


def test_a_device_that_fails_in_a_step_is_not_asked_for_more(bringup):
    ran = []

    def failing(executable, operands):
        ran.append(executable.types)
        raise LoweringError("the core of the device has stopped")

    (result,) = bringup(failing, wanted=("operators",))
    assert (len(result.failures), len(ran)) == (1, 1)
    assert "the core of the device has stopped" in result.failures[0].message


def test_a_variable_that_is_not_set_fails_the_environment(npu_artifact):
    ladder = Bringup(npu_artifact, RankSettings(device="emulated"), {}, tiny.QUIET, wanted=("environment",))
    (result,) = ladder.run()
    assert result.failures[0].assumption == "toolchain"
    assert "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True" in result.failures[0].message


SMALLEST = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture
def climb(tmp_path, monkeypatch):
    """Brings up an artifact for a mesh: one decode bucket of one request with three drafts, so that a body repeats, and a prefill."""
    monkeypatch.setattr(layers, "STEPS", 1)
    monkeypatch.setattr(rungs, "RECORDED_STEPS", 1)

    def run(mesh, wanted=RUNGS):
        artifact = faulty.npu_artifact(tmp_path, monkeypatch, mesh, {"buckets": (1,), "num_speculative_tokens": 3}, **SMALLEST)
        planned = {name: setting.value for name, setting in artifact.manifest.environment.items()}
        settings = RankSettings(device="emulated", threads=1)
        return Bringup(artifact, settings, {**os.environ, **planned}, tiny.QUIET, wanted=wanted).run()

    return run


def test_ranks_of_several_devices_run_the_collectives_before_whole_buckets(climb, monkeypatch):
    monkeypatch.setattr(executors, "open_device", lambda kind, index=0: FaultyDevice(wrong_results(is_alone("HcomAllGather")), index=index))
    (result,) = climb("tp=2", wanted=("collectives", "buckets"))
    assert (result.name, result.passed) == ("collectives", False)
    assert result.failures[0].assumption == "communicators"
    assert "HcomAllGather" in result.failures[0].what
    assert result.failures[0].message.startswith("rank 0: ")


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
@pytest.mark.long
def test_every_mesh_climbs_the_ladder_to_its_end(mesh, climb):
    results = climb(mesh)
    assert [(result.name, result.failures) for result in results] == [(name, []) for name in RUNGS]
    assert {result.name: result for result in results}["collectives"].facts["collectives"] > 0
