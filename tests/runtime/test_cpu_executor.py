"""runtime/cpu_executor.py: buckets change no output, executables are swapped in while serving, nothing is traced or compiled."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny

from npucompile.graphs import compile_count
from npucompile.graphs.errors import ArtifactError, ArtifactStale, ArtifactTampered, LoweringError, SpecError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact import artifact as artifact_module
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime import cpu_executor as module
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import COMPILER_MODULES
from npucompile.runtime.request import FinishEvent, Request, Sampling, TokenEvent
from npucompile.runtime.steps.rows import DecodeRow, PrefillRow

ALL = (Bucket("decode", 1, 4), Bucket("decode", 2, 4), Bucket("decode", 4, 4), Bucket("prefill", 1, 4), Bucket("prefill", 1, 16))
GREEDY, KINDS = Sampling(), frozenset({"prefill", "decode"})


@pytest.fixture(scope="module")
def plain(tiny_checkpoint, tmp_path_factory):
    """The same model, built without drafts and log probabilities."""
    out = tmp_path_factory.mktemp("plain") / "tiny"
    tiny.built(tiny.planned(tiny_checkpoint, num_speculative_tokens=0, max_logprobs=0, buckets=(1,), prefill=(16,)), out)
    return Artifact.open(out)


@pytest.fixture(scope="module")
def executor(tiny_artifact, plain):
    """Made after the artifacts were traced, because it counts what is traced from then on."""
    return CpuExecutor(Artifact.open(tiny_artifact))


def request_slots_of(executor):
    """The pool of request slots."""
    return executor._state[[leaf.name for leaf in executor.artifact.manifest.state].index("state.request_slots")]


def step(executor, bucket, tokens=(5, 6, 7, 8)):
    """Outputs of a step with one live row at the start of its context, the same every time."""
    row = PrefillRow(tokens[: bucket.q_len], 0, [1], 1, 1)
    if bucket.kind == "decode":
        request_slots_of(executor)[1] = torch.tensor([0, 0, *tokens[: bucket.q_len]])
        row = DecodeRow(1, 0, [1], [1 + i for i in range(bucket.q_len)], bucket.q_len - 1)
    return tiny.run_row(executor, bucket, row)


def test_it_runs_every_bucket_it_names(executor):
    assert executor.buckets == ALL
    assert executor.backends == {bucket.name: "eager" for bucket in ALL}
    assert executor.vocab_size == tiny.VOCAB
    for bucket in executor.buckets:
        outputs = step(executor, bucket)
        B, W = bucket.batch, bucket.q_len if bucket.kind == "decode" else 1
        shapes = {"tokens": (B, W), "drafts": (B, 3), "top_ids": (B, W, 20)} | ({"counts": (B,)} if W > 1 else {})
        floats = {"logits": (B, W, tiny.VOCAB), "chosen_logprobs": (B, W), "top_logprobs": (B, W, 20)}
        assert {name: (a.shape, a.dtype) for name, a in outputs.items()} == {
            **{name: (shape, np.int32) for name, shape in shapes.items()}, **{name: (shape, np.float32) for name, shape in floats.items()}
        }  # fmt: skip
        assert outputs["tokens"][0].tolist() == outputs["logits"][0].argmax(-1).tolist()


def test_an_artifact_without_drafts_and_log_probabilities_has_no_such_outputs(executor, plain):
    assert (executor.max_logprobs, CpuExecutor(plain).max_logprobs) == (20, 0)
    assert set(step(CpuExecutor(plain), Bucket("decode", 1, 1))) == {"tokens", "counts", "logits"}


def test_a_bucket_it_does_not_have_is_named(executor):
    with pytest.raises(SpecError, match=r"no bucket decode-b3-q4; the artifact has decode-b1-q4, .*prefill-b1-q16"):
        step(executor, Bucket("decode", 3, 4))


def test_state_is_what_the_plan_said(executor, tiny_checkpoint):
    assert executor.state_bytes == tiny.planned(tiny_checkpoint).state_bytes


def test_an_artifact_without_weights_cannot_run(own_artifact):
    artifact = tiny.published(own_artifact, lambda manifest, _: replace(manifest, weights=None))
    with pytest.raises(ArtifactError, match="built without weights: it can be inspected, and not run"):
        CpuExecutor(artifact)


# --- buckets change nothing ---


def collect(engine, request, into, ends=None):
    def sink(event):
        if isinstance(event, TokenEvent):
            into.extend(event.token_ids)
        elif isinstance(event, FinishEvent):
            into.append(event.reason)
            if ends is not None:
                ends.append(event)

    engine.submit(request, sink)


@pytest.fixture(scope="module")
def reference_run(plain):
    """The output of a request by itself, from zeroed state, in buckets of batch 1, without drafts."""

    @cache
    def run(prompt, count, sampling=GREEDY, stop=frozenset()):
        engine = Engine(CpuExecutor(plain), refresh_every_s=None)
        tokens = []
        collect(engine, Request("0", prompt, count, sampling, stop), tokens)
        while engine.step():
            pass
        return tokens

    return run


PROMPTS = [(7,), (9, 8, 250), tuple(range(40, 44)), tuple(range(3, 20)), tuple(range(60, 97)), tuple(range(90, 150)), (1,) * 33]

requests = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, 14),
        st.sampled_from(["greedy", "greedy", "sampled", "sampled", "stopped", "cancelled"]),
        st.sampled_from([None, None, None, 0, 1, 2]),
        st.integers(0, 6),
    ),
    min_size=2,
    max_size=5,
)
bucket_lists = st.sampled_from([ALL, (ALL[0], ALL[4]), (ALL[1], ALL[3]), (ALL[2], ALL[3], ALL[4]), (ALL[0], ALL[2], ALL[3])])
# All pages, or too few for all requests, so that some are preempted and prefilled again.
page_counts = st.sampled_from([17, 6])


@settings(max_examples=20)
@given(requests, bucket_lists, page_counts, st.sampled_from([0, 1]), st.sampled_from([frozenset(), KINDS]))
def test_whatever_shares_the_batch_and_whichever_buckets_run_it(executor, reference_run, mix, buckets, pages, run_ahead, any_size):
    """Pools are poisoned: a request must read only what it wrote itself."""
    tiny.poison(executor)
    executor.any_size = any_size
    with tiny.Launching(tiny.Narrowed(executor, buckets, num_pages=pages)) as launching:
        engine = Engine(launching, refresh_every_s=None, prefill_burst=2, run_ahead=run_ahead)
        outputs, expected = [], []
        for i, (prompt, count, kind, drafts, wait) in enumerate(mix):
            sampling = Sampling(0.4, 20, 0.95, 0.01, seed=i) if kind == "sampled" else GREEDY
            unstopped = reference_run(prompt, count, sampling)
            stop = frozenset(unstopped[wait % (len(unstopped) - 1) :][:1]) if kind == "stopped" else frozenset()
            expected.append(reference_run(prompt, count, sampling, stop))
            outputs.append([])
            collect(engine, Request(str(i), prompt, count, sampling, stop, speculative_tokens=drafts), outputs[-1])
            for _ in range(wait):
                engine.step()
            if kind == "cancelled":
                engine.cancel(str(i))
        while engine.step():
            pass
        engine.stepper.check()
    for (_, _, kind, _, _), tokens, want in zip(mix, outputs, expected, strict=True):
        if kind == "cancelled":
            assert tokens[:-1] == want[: len(tokens) - 1]
            assert tokens[-1] in ("cancelled", "length")
        else:
            assert tokens == want
    executor.any_size = frozenset()
    assert executor.compiles() == 0


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.4, seed=3)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_drafts_are_accepted_and_the_next_step_is_launched_before_the_last_is_read(executor, reference_run, run_ahead, sampling):
    """The test above would also pass if no draft were ever accepted."""
    tiny.poison(executor)
    with tiny.Launching(executor) as launching:
        engine = Engine(launching, refresh_every_s=None, run_ahead=run_ahead)
        sinks = [[] for _ in PROMPTS[:4]]
        ends = []
        for i, (prompt, tokens) in enumerate(zip(PROMPTS, sinks, strict=False)):
            collect(engine, Request(str(i), prompt, 24, sampling), tokens, ends)
        while engine.step():
            pass
    assert sinks == [reference_run(prompt, 24, sampling) for prompt in PROMPTS[:4]]
    assert launching.most_in_flight == 1 + run_ahead
    accepted = [sum(times) for times in zip(*(end.record.accepted_per_position for end in ends), strict=True)]
    assert all(accepted), accepted
    steps = sum(end.record.verify_steps for end in ends)
    assert sum(accepted) < sum(end.record.drafted_tokens for end in ends) <= 3 * steps


def test_poison_reaches_a_request_that_reads_what_it_did_not_write(tiny_artifact):
    """Shows that poisoned pools would be noticed."""
    executor = CpuExecutor(Artifact.open(tiny_artifact))
    tiny.poison(executor)
    decode = ALL[0]
    request_slots_of(executor)[1] = torch.tensor([3, 0, 5, 6, 7, 8])
    row = DecodeRow(1, 3, [1], [1, 2, 3, 4], 3)
    outputs = tiny.run_row(executor, decode, row)
    assert np.isnan(outputs["logits"]).any()


# --- swapping ---


def test_without_an_executable_a_bucket_runs_uncompiled_and_says_so(own_artifact, stub):
    executor = CpuExecutor(tiny.with_compiled(own_artifact, "stub", ["decode-b1-q4"]))
    assert executor.backends == {bucket.name: "stub" if bucket == ALL[0] else "eager" for bucket in ALL}


def test_what_a_build_finished_is_swapped_in_between_steps(own_artifact, stub, reference_run):
    executor = CpuExecutor(Artifact.open(own_artifact))
    now = [0.0]
    engine = Engine(executor, clock=lambda: now[0], refresh_every_s=1.0)
    tokens = []
    collect(engine, Request("0", PROMPTS[3], 16), tokens)
    while len(tokens) < 5:
        engine.step()
    tiny.with_compiled(own_artifact, "stub", ["decode-b1-q4", "decode-b4-q4"])
    engine.step()
    assert set(engine.stats()["backends"].values()) == {"eager"}
    now[0] = 1.0
    engine.step()
    assert {name for name, backend in engine.stats()["backends"].items() if backend == "stub"} == {"decode-b1-q4", "decode-b4-q4"}
    while engine.step():
        pass
    assert tokens == reference_run(PROMPTS[3], 16)
    assert engine.stats()["compiles_after_ready_total"] == 0
    # Steps run the new executable.
    logits = step(executor, ALL[0])["logits"]
    stub.error = 8.0
    assert np.allclose(step(executor, ALL[0])["logits"], logits + 8.0)
    assert not np.allclose(step(executor, ALL[1])["logits"][0], logits[0] + 8.0)


def test_refresh_without_news_changes_nothing(own_artifact, stub):
    executor = CpuExecutor(Artifact.open(own_artifact))
    assert not executor.refresh()
    tiny.published(own_artifact, lambda manifest, _: manifest)
    assert not executor.refresh()
    tiny.with_compiled(own_artifact, "stub", ["decode-b1-q4"])
    assert executor.refresh()
    assert not executor.refresh()
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, source_digest="other"))
    assert not executor.refresh()


def test_what_is_published_while_the_artifact_is_opened_is_seen_later(own_artifact, stub, monkeypatch):
    right = artifact_module.decode

    def publish_meanwhile(data, where):
        monkeypatch.setattr(artifact_module, "decode", right)
        tiny.with_compiled(own_artifact, "stub")
        return right(data, where)

    monkeypatch.setattr(artifact_module, "decode", publish_meanwhile)
    executor = CpuExecutor(Artifact.open(own_artifact))
    assert set(executor.backends.values()) == {"eager"}
    assert executor.refresh()
    assert set(executor.backends.values()) == {"stub"}


def test_a_directory_built_anew_from_other_weights_is_left_reference_run(tmp_path, own_artifact, stub, caplog):
    """Its executables would run over the old weights, or over pools of other sizes."""
    executor = CpuExecutor(Artifact.open(own_artifact))
    tokens = step(executor, ALL[0])["tokens"].tolist()
    tiny.built(tiny.planned(tiny.write_checkpoint(tmp_path / "other", seed=5), backend="stub"), own_artifact)
    with caplog.at_level(logging.WARNING, module.__name__):
        assert not executor.refresh()
    assert "was rebuilt from other weights" in caplog.text
    assert set(executor.backends.values()) == {"eager"}
    assert step(executor, ALL[0])["tokens"].tolist() == tokens
    assert not executor.refresh()


def test_executables_of_another_toolchain_are_not_loaded(own_artifact, stub):
    executor = CpuExecutor(Artifact.open(own_artifact))
    toolchain = {**executor.artifact.manifest.toolchain, "torch": "1.0"}
    tiny.with_compiled(own_artifact, "stub", toolchain=toolchain)
    with pytest.raises(ArtifactStale, match=r"torch was '1\.0' and is"):
        executor.refresh()
    assert set(executor.backends.values()) == {"eager"}


def test_a_bucket_whose_graph_changed_keeps_the_one_it_has(own_artifact, stub):
    executor = CpuExecutor(Artifact.open(own_artifact))

    def change(manifest, writer):
        first, *rest = manifest.graphs
        file = writer.add("graphs", b"another graph", "graph")
        return replace(manifest, graphs=(replace(first, eager=file), *rest))

    tiny.published(own_artifact, change)
    tiny.with_compiled(own_artifact, "stub")
    changed = executor.artifact.manifest.graphs[0].bucket
    assert executor.refresh()
    assert executor.backends == {bucket.name: "eager" if bucket == changed else "stub" for bucket in ALL}


def test_what_cannot_be_loaded_is_reported_once_and_the_old_executables_stay(own_artifact, stub):
    executor = CpuExecutor(Artifact.open(own_artifact))

    def change(manifest, writer):
        first, *rest = manifest.graphs
        file = writer.add("graphs", b"no graph", "stub")
        return replace(manifest, graphs=(replace(first, compiled=tiny.ExecutableRecord("stub", file, "key")), *rest))

    tiny.published(own_artifact, change)
    with pytest.raises(LoweringError):
        executor.refresh()
    assert not executor.refresh()
    assert set(executor.backends.values()) == {"eager"}
    step(executor, ALL[0])
    step(executor, executor.artifact.manifest.graphs[0].bucket)


def test_a_tampered_executable_is_not_swapped_in(own_artifact, stub):
    executor = CpuExecutor(Artifact.open(own_artifact))

    def change(manifest, writer):
        first, *rest = manifest.graphs
        file = writer.add("graphs", (own_artifact / first.eager).read_bytes() + b"\0", "stub")
        return replace(manifest, graphs=(replace(first, compiled=tiny.ExecutableRecord("stub", file, "key")), *rest))

    newer = tiny.published(own_artifact, change)
    file = own_artifact / newer.manifest.graphs[0].compiled.file
    tiny.tampered(file)
    with pytest.raises(ArtifactTampered, match=file.name):
        executor.refresh()
    assert set(executor.backends.values()) == {"eager"}


# --- nothing is traced or compiled ---


def test_the_counter_sees_a_trace(tiny_checkpoint, tiny_artifact):
    plan = tiny.planned(tiny_checkpoint)
    executor = CpuExecutor(Artifact.open(tiny_artifact))
    step(executor, ALL[0])
    assert executor.compiles() == 0
    tiny.stages.stage(plan, ALL[0])
    assert executor.compiles() > 0
    assert CpuExecutor(executor.artifact).compiles() == 0


def test_the_counter_sees_a_compile_and_a_compiler(monkeypatch, executor):
    counted = executor.compiles()
    compile_count.record("compile")
    assert executor.compiles() == counted + 1
    for name in COMPILER_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    fresh = CpuExecutor(executor.artifact)
    assert fresh.compiles() == 0
    monkeypatch.setitem(sys.modules, COMPILER_MODULES[0], torch)
    assert fresh.compiles() == 1


# --- one rank of several ---


def test_an_artifact_for_several_devices_needs_a_rank(sharded):
    artifact = Artifact.open(sharded("dp=2,tp=2"))
    with pytest.raises(SpecError, match=r"is for mesh dp=2,tp=2: it runs as 4 ranks, a process each, and not in this one alone"):
        CpuExecutor(artifact)
    with pytest.raises(SpecError, match=r"rank 4 of mesh dp=2,tp=2; legal is 0 to 3"):
        CpuExecutor(artifact, rank=4)


def test_a_rank_loads_its_shards_and_knows_its_coordinates(sharded):
    artifact, single = Artifact.open(sharded("dp=2,tp=2")), CpuExecutor(Artifact.open(sharded("")))
    executors = [CpuExecutor(artifact, rank=rank) for rank in range(4)]
    assert [executor._coords.tolist() for executor in executors] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    # Each dp group has pools of its own; within a group they are split by heads, but for the request slots.
    request_slots = request_slots_of(single).nbytes
    assert {executor.state_bytes - request_slots for executor in executors} == {(single.state_bytes - request_slots) // 2}
    whole = artifact.load_weights()
    names = [leaf.name for leaf in artifact.manifest.params]
    experts = next(leaf.name for leaf in artifact.manifest.params if leaf.aval.axes[0] == "experts")
    parts, rows = ([executor._params[names.index(name)] for executor in executors] for name in (experts, "params.embed"))
    assert torch.equal(torch.cat(parts), whole[experts])
    assert torch.equal(torch.cat(rows[:2]), whole["params.embed"])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])


def test_the_coordinates_of_a_rank_reach_its_graph(sharded):
    executor = CpuExecutor(Artifact.open(sharded("tp=2")), rank=1)
    coords = []
    executor._executables[ALL[0]] = lambda operands: coords.append(operands[-1]) or [torch.zeros(1)] * len(executor._output_names[ALL[0]])
    step(executor, ALL[0])
    assert list(executor._input_rows[ALL[0]])[-1] == "coords"
    assert coords[0].tolist() == [0, 1]
    assert coords[0].dtype == torch.int32
