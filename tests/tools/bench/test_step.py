from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support import tiny
from support.tiny import QUIET

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.manifest import GraphEntry, Manifest
from npucompile.lowering.backend import open_executable
from npucompile.lowering.executable import check_operands
from npucompile.models import request_slots
from npucompile.tools.bench import step
from npucompile.tools.bench.machine import ReadLoop
from npucompile.tools.bench.report import Value
from npucompile.tools.bench.step import StepCase, decode_contexts, decode_row, needed_bytes, prepared, random_state, step_operands


@pytest.fixture(autouse=True)
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "STEPS", 1)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float, *operands: object) -> list[torch.Tensor]:
        self.now += seconds
        return []


@pytest.fixture(scope="module")
def artifact(tiny_artifact: Path) -> Artifact:
    return Artifact.open(tiny_artifact)


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Without drafts and log probabilities."""
    out = tmp_path_factory.mktemp("plain") / "tiny"
    tiny.built(tiny.planned(tiny_checkpoint, num_speculative_tokens=0, max_logprobs=0, buckets=(2,), prefill=(4,)), out)
    return Artifact.open(out)


def entry_of(manifest: Manifest, name: str) -> GraphEntry:
    return next(entry for entry in manifest.graphs if entry.bucket.name == name)


def named(entry: GraphEntry, operands: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs = operands[-len(entry.inputs) :]
    return {leaf.path: tensor for leaf, tensor in zip(entry.inputs, inputs, strict=True)}


def test_bytes_grow_by_the_keys_and_values_of_each_token(artifact: Artifact) -> None:
    manifest = artifact.manifest
    for name in ("decode-b1-q4", "decode-b4-q4", "prefill-b1-q16"):
        entry = entry_of(manifest, name)
        longest = manifest.limits.max_model_len
        sizes = [needed_bytes(manifest, entry, context) for context in range(longest)]
        # The whole table is what the graph's own count has; the last token comes into the cache in the step itself.
        assert sizes[longest - entry.bucket.q_len] == entry.cost["read_bytes"]
        # One attention layer with one key head of 16 float32 numbers, keys and values; and one of the draft head, for each draft.
        assert sizes[1] - sizes[0] == entry.bucket.batch * (1 + 3) * 2 * 16 * 4
        assert sizes == sorted(sizes)
        assert sizes[0] > 0


def test_without_drafts_no_draft_head_is_read(plain: Artifact) -> None:
    entry = entry_of(plain.manifest, "decode-b2-q1")
    assert needed_bytes(plain.manifest, entry, 9) - needed_bytes(plain.manifest, entry, 8) == 2 * 2 * 16 * 4


def test_bytes_are_those_that_the_graphs_count_has_for_a_longer_context(tiny_checkpoint: Path, artifact: Artifact) -> None:
    entry = entry_of(artifact.manifest, "decode-b4-q4")
    longer = tiny.stage_once(tiny.planned(tiny_checkpoint, max_model_len=128), entry.bucket)
    per_token = needed_bytes(artifact.manifest, entry, 1) - needed_bytes(artifact.manifest, entry, 0)
    # It reads longer page tables, too: 4 pages more, 4 bytes each.
    assert longer.partitioned.cost().read_bytes - entry.cost["read_bytes"] == pytest.approx(64 * per_token, rel=0.02)


@pytest.mark.parametrize("context", [0, 1, 32, 60])
def test_rows_are_live_and_share_nothing(artifact: Artifact, context: int) -> None:
    manifest = artifact.manifest
    entry = entry_of(manifest, "decode-b4-q4")
    weights = artifact.load_weights()
    operands, rows = step_operands(manifest, [weights[leaf.name] for leaf in manifest.params], entry, context)
    check_operands(operands, manifest.signature(entry))
    inputs = named(entry, operands)
    assert rows == 4
    assert inputs["base"].tolist() == [context] * 4
    assert inputs["drafts"].tolist() == [3] * 4
    pages = inputs["page_table"][inputs["page_table"] > 0].tolist()
    # Four candidates, and three drafts after them.
    assert len(pages) == len(set(pages)) == 4 * -(-min(64, context + 7) // manifest.limits.page_size)
    assert len(set(inputs["state_slots_out"].flatten().tolist()) - {0}) == 16
    pools = dict(zip((leaf.name for leaf in manifest.state), operands[len(manifest.params) : -len(entry.inputs)], strict=True))
    slots = pools.pop("state.request_slots")[inputs["request_slots"].long()]
    assert len(set(inputs["request_slots"].tolist()) - {0}) == 4
    assert (slots[:, request_slots.START].tolist(), slots[:, request_slots.ACCEPTED].tolist()) == ([context] * 4, [0] * 4)
    assert len(set(slots[:, request_slots.TOKENS :].flatten().tolist())) > 8
    assert all(bool(torch.count_nonzero(pool) > 0.9 * pool.numel()) for pool in pools.values())
    outputs = open_executable(artifact.path / entry.reference, "eager")(operands)
    counts = dict(zip((leaf.name for leaf in entry.outputs), outputs, strict=True))["outputs.counts"]
    assert all(1 <= count <= 4 for count in counts.tolist())


def test_fewer_rows_where_the_artifact_has_not_the_slots(artifact: Artifact) -> None:
    manifest = replace(artifact.manifest, limits=replace(artifact.manifest.limits, num_slots=9))
    _, rows = step_operands(manifest, [], entry_of(manifest, "decode-b4-q4"), 8)
    assert rows == 2


def test_a_prepared_case_runs(artifact: Artifact, plain: Artifact) -> None:
    for opened in (artifact, plain):
        weights = opened.load_weights()
        params = [weights[leaf.name] for leaf in opened.manifest.params]
        for entry in opened.manifest.graphs:
            (case,) = prepared(opened, params, entry, (5,), random_state(opened.manifest))
            assert list(case.executables) == ["eager"]
            outputs = dict(zip((leaf.name for leaf in entry.outputs), case.executables["eager"](case.operands), strict=True))
            assert torch.isfinite(outputs["outputs.logits"]).all()


def test_every_step_starts_where_the_first_one_did(artifact: Artifact) -> None:
    weights = artifact.load_weights()
    entry = entry_of(artifact.manifest, "decode-b2-q4")
    params = [weights[leaf.name] for leaf in artifact.manifest.params]
    (ready,) = prepared(artifact, params, entry, (5,), random_state(artifact.manifest))
    assert ready.request_slots is not None
    pool, first = ready.request_slots
    assert any(operand is pool for operand in ready.operands)
    eager, outputs = ready.executables["eager"], []

    def noted(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs.append(pool.clone())
        return eager(operands)

    clock = FakeClock()
    calls = replace(ready, executables={"eager": noted, "compiled": noted}).calls()  # type: ignore[dict-item]
    step.in_turns([calls], 2, clock, QUIET, "steps")
    assert len(outputs) >= 2 * 2
    assert all(torch.equal(output, first) for output in outputs)
    assert not torch.equal(pool, first), "a step leaves another start"


def case(artifact: Artifact, executables: dict[str, Callable[..., list[torch.Tensor]]], rows: int = 4) -> StepCase:
    return StepCase(entry_of(artifact.manifest, "decode-b4-q4"), 7, rows, executables, [], 500)  # type: ignore[arg-type]


def row_of(timed: StepCase, beside: ReadLoop, repetitions: int, clock: FakeClock) -> dict[str, Value]:
    (seconds,) = step.in_turns([timed.calls() | {"read": beside.read}], repetitions, clock, QUIET, "steps")
    return decode_row(timed, beside, seconds)


def test_a_slow_time_of_the_machine_is_in_few_samples_of_each(artifact: Artifact) -> None:
    clock = FakeClock()

    def work(seconds: float, *_: object) -> list[torch.Tensor]:
        # For a round and a half the machine is slow.
        return clock.work(seconds * (10 if 30 <= clock.now < 200 else 1))

    groups = [
        case(artifact, {"eager": partial(work, seconds), "compiled": partial(work, seconds / 2)}).calls() for seconds in (0.5, 1.0, 2.0)
    ]
    samples = step.in_turns(groups, 7, clock, QUIET, "steps")
    assert all(1 <= sum(second > 2 * min(seconds) for second in seconds) <= 2 for of in samples for seconds in of.values())
    assert [statistics.median(of["eager"]) for of in samples] == [0.5, 1.0, 2.0]


def test_a_row_sets_each_time_beside_the_floor_of_its_round(artifact: Artifact) -> None:
    clock = FakeClock()
    executables = {"eager": partial(clock.work, 4.0), "compiled": partial(clock.work, 2.0)}
    beside = ReadLoop(lambda: clock.work(1.0), 1000, "cache")
    row = row_of(case(artifact, executables), beside, 3, clock)
    medians = {key: getattr(value, "median", value) for key, value in row.items()}
    assert medians == {
        "bucket": "decode-b4-q4", "context_tokens": 7, "eager_ms": 4000.0, "compiled_ms": 2000.0, "speedup": 2.0, "read_mb": 0.0005,
        "read_gb_per_s": 1e-6, "read_from": "cache", "floor_ms": 500.0, "over_floor": 4.0,
    }  # fmt: skip


def test_an_uncompiled_bucket_is_set_beside_its_floor_too(artifact: Artifact) -> None:
    clock = FakeClock()
    row = row_of(case(artifact, {"eager": partial(clock.work, 4.0)}, rows=3), ReadLoop(lambda: clock.work(1.0), 1000, "memory"), 2, clock)
    assert "compiled_ms" not in row
    assert row["over_floor"].median == 8.0  # type: ignore[union-attr]
    assert row["bucket"] == "decode-b4-q4 (3 rows)"


def test_contexts_are_a_short_one_and_half_of_the_longest(artifact: Artifact) -> None:
    assert decode_contexts(artifact.manifest) == (32,)
    long = replace(artifact.manifest, limits=replace(artifact.manifest.limits, max_model_len=1024))
    assert decode_contexts(long) == (64, 512)


def test_samples_are_medians_of_steps_in_a_row(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "STEPS", 3)
    clock = FakeClock()
    durations = iter([9.0, 1.0, 2.0, 8.0] * 3)
    seconds = step.in_turns([case(artifact, {"eager": lambda _: clock.work(next(durations))}).calls()], 2, clock, QUIET, "steps")
    assert seconds == [{"eager": [2.0, 2.0]}]
    assert next(durations, None) is None


def test_every_bucket_is_measured_eager_and_compiled(own_artifact: Path) -> None:
    artifact = tiny.with_compiled(own_artifact, buckets=("decode-b1-q4", "decode-b4-q4", "prefill-b1-q16"))
    steps, bandwidth = step.decode(artifact, 1, QUIET, cache=2**30, memory_buffer_bytes=2**21)
    assert [(row["bucket"], "compiled_ms" in row) for row in steps.rows] == [
        ("decode-b1-q4", True), ("decode-b2-q4", False), ("decode-b4-q4", True)
    ]  # fmt: skip
    assert {row["read_from"] for row in steps.rows} == {"cache"}
    assert bandwidth.rows[0]["buffer_mb"] == pytest.approx(2.097, abs=0.001)
    # Without a known cache the floor is memory's.
    steps, bandwidth = step.decode(artifact, 1, QUIET, cache=0, memory_buffer_bytes=2**21)
    assert ({row["read_from"] for row in steps.rows}, [row["place"] for row in bandwidth.rows]) == ({"memory"}, ["memory"])
    prefill = step.prefill(artifact, 1, QUIET)
    assert [(row["bucket"], "compiled_tokens_per_s" in row) for row in prefill.rows] == [("prefill-b1-q4", False), ("prefill-b1-q16", True)]


def test_a_kind_without_buckets_is_named(artifact: Artifact) -> None:
    decode_only = replace(artifact.manifest, graphs=tuple(e for e in artifact.manifest.graphs if e.bucket.kind == "decode"))
    with pytest.raises(SpecError, match="no prefill bucket; it has decode-b1-q4"):
        step.prefill(Artifact(artifact.path, decode_only, ""), 1, QUIET)
