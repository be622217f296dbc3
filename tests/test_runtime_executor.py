"""runtime/executor.py: buckets change nothing, executables are swapped in while serving, nothing is traced or compiled."""

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

from npucompile.graphs import events
from npucompile.graphs.errors import ArtifactError, ArtifactStale, ArtifactTampered, LoweringError, SpecError
from npucompile.graphs.types import Bucket
from npucompile.lowering import artifact as artifact_module
from npucompile.lowering.artifact import Artifact
from npucompile.runtime import executor as module
from npucompile.runtime.buckets import Row, pack
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import Executor
from npucompile.runtime.request import FinishEvent, Request, Sampling, TokenEvent

ALL = (Bucket("decode", 1, 1), Bucket("decode", 2, 1), Bucket("decode", 4, 1), Bucket("prefill", 1, 4), Bucket("prefill", 1, 16))
ONE = (Bucket("decode", 1, 1), Bucket("prefill", 1, 16))


@pytest.fixture(scope="module")
def executor(tiny_artifact):
    return Executor(Artifact.open(tiny_artifact))


def step(executor, bucket, tokens=(5, 6, 7)):
    row = Row(tokens[: bucket.q_len], 0, [1], 1, [1], Sampling(), [])
    return executor.run(bucket, pack(bucket, [row], executor.limits))


def test_it_runs_every_bucket_it_names(executor, tiny):
    assert executor.buckets == ALL
    assert executor.backends == {bucket.name: "eager" for bucket in ALL}
    assert executor.vocab_size == tiny.VOCAB
    for bucket in executor.buckets:
        outputs = step(executor, bucket)
        assert (outputs["tokens"].shape, outputs["tokens"].dtype) == ((bucket.batch, 1), np.int32)
        assert (outputs["logits"].shape, outputs["logits"].dtype) == ((bucket.batch, 1, tiny.VOCAB), np.float32)
        assert outputs["tokens"][0, 0] == outputs["logits"][0, 0].argmax()


def test_a_bucket_it_does_not_have_is_named(executor):
    with pytest.raises(SpecError, match=r"no bucket decode-b3-q1; the artifact has decode-b1-q1, .*prefill-b1-q16"):
        step(executor, Bucket("decode", 3, 1))


def test_state_is_what_the_plan_said(executor, tiny, tiny_checkpoint):
    assert executor.state_bytes == tiny.planned(tiny_checkpoint).state_bytes


def test_an_artifact_without_weights_cannot_run(tiny, own_artifact):
    artifact = tiny.published(own_artifact, lambda manifest, _: replace(manifest, weights=None))
    with pytest.raises(ArtifactError, match="built without weights: it can be inspected, and not run"):
        Executor(artifact)


# --- buckets change nothing ---


def collect(engine, request, into):
    def sink(event):
        if isinstance(event, TokenEvent):
            into.extend(event.token_ids)
        elif isinstance(event, FinishEvent):
            into.append(event.reason)

    engine.submit(request, sink)


@pytest.fixture(scope="module")
def alone(tiny, tiny_artifact):
    """Greedy tokens of a request that has the machine to itself, from zeroed state, through batch 1."""
    artifact = Artifact.open(tiny_artifact)

    @cache
    def run(prompt, count):
        engine = Engine(tiny.Narrowed(Executor(artifact), ONE), refresh_every_s=None)
        tokens = []
        collect(engine, Request("0", prompt, count), tokens)
        while engine.step():
            pass
        return tokens

    return run


PROMPTS = [(7,), (9, 8, 250), tuple(range(40, 44)), tuple(range(3, 20)), tuple(range(60, 97)), tuple(range(90, 150)), (1,) * 33]

requests = st.lists(
    st.tuples(
        st.sampled_from(PROMPTS),
        st.integers(1, 9),
        st.sampled_from(["greedy", "greedy", "greedy", "sampled", "cancelled"]),
        st.integers(0, 6),
    ),
    min_size=2,
    max_size=5,
)
bucket_lists = st.sampled_from([ALL, (ALL[0], ALL[4]), (ALL[1], ALL[3]), (ALL[2], ALL[3], ALL[4]), (ALL[0], ALL[2], ALL[3])])
# All pages, or too few for everybody: then requests are preempted and prefilled again.
page_counts = st.sampled_from([17, 6])


@settings(max_examples=20)
@given(requests, bucket_lists, page_counts)
def test_whatever_shares_the_batch_and_whichever_buckets_run_it(tiny, executor, alone, mix, buckets, pages):
    """Pools are poisoned: what a request did not write itself, it must not read."""
    tiny.poison(executor)
    engine = Engine(tiny.Narrowed(executor, buckets, num_pages=pages), refresh_every_s=None, prefill_burst=2)
    outputs = []
    for i, (prompt, count, kind, wait) in enumerate(mix):
        sampling = Sampling(0.8, 20, 0.9, 0.01, seed=i) if kind == "sampled" else Sampling()
        outputs.append([])
        collect(engine, Request(str(i), prompt, count, sampling), outputs[-1])
        for _ in range(wait):
            engine.step()
        if kind == "cancelled":
            engine.cancel(str(i))
    while engine.step():
        pass
    for (prompt, count, kind, _), found in zip(mix, outputs, strict=True):
        expected = alone(prompt, count)
        if kind == "greedy":
            assert found == expected
        elif kind == "cancelled":
            assert found[:-1] == expected[: len(found) - 1]
            assert found[-1] in ("cancelled", "length")
        else:
            assert found[-1] == "length"
            assert len(found) == min(count, executor.limits.max_model_len - len(prompt)) + 1
            assert all(0 <= token < executor.vocab_size for token in found[:-1])
    assert executor.compiles() == 0


def test_poison_reaches_a_request_that_reads_what_it_did_not_write(tiny, tiny_artifact, alone):
    """The test above can fail."""
    executor = Executor(Artifact.open(tiny_artifact))
    tiny.poison(executor)
    decode = ALL[0]
    row = Row([5], 3, [1], 1, [1], Sampling(), [])
    outputs = executor.run(decode, pack(decode, [row], executor.limits))
    assert np.isnan(outputs["logits"]).any()


# --- swapping ---


@pytest.fixture
def stub(tiny, monkeypatch):
    return tiny.Stub().install(monkeypatch)


def test_without_an_executable_a_bucket_runs_uncompiled_and_says_so(tiny, own_artifact, stub):
    executor = Executor(tiny.with_compiled(own_artifact, "stub", ["decode-b1-q1"]))
    assert executor.backends == {bucket.name: "stub" if bucket == ALL[0] else "eager" for bucket in ALL}
    assert set(Executor(executor.artifact, prefer_eager=True).backends.values()) == {"eager"}


def test_what_a_build_finished_is_swapped_in_between_steps(tiny, own_artifact, stub, alone):
    executor = Executor(Artifact.open(own_artifact))
    now = [0.0]
    engine = Engine(executor, clock=lambda: now[0], refresh_every_s=1.0)
    tokens = []
    collect(engine, Request("0", PROMPTS[3], 16), tokens)
    while len(tokens) < 5:
        engine.step()
    tiny.with_compiled(own_artifact, "stub", ["decode-b1-q1", "decode-b4-q1"])
    engine.step()
    assert set(engine.stats()["backends"].values()) == {"eager"}
    now[0] = 1.0
    engine.step()
    assert {name for name, backend in engine.stats()["backends"].items() if backend == "stub"} == {"decode-b1-q1", "decode-b4-q1"}
    while engine.step():
        pass
    assert tokens == alone(PROMPTS[3], 16)
    assert engine.stats()["compiles_after_ready_total"] == 0
    # It is the new executable that runs.
    logits = step(executor, ALL[0])["logits"]
    stub.error = 8.0
    assert np.allclose(step(executor, ALL[0])["logits"], logits + 8.0)
    assert not np.allclose(step(executor, ALL[1])["logits"][0], logits[0] + 8.0)


def test_refresh_without_news_changes_nothing(tiny, own_artifact, stub):
    executor = Executor(Artifact.open(own_artifact))
    assert not executor.refresh()
    tiny.published(own_artifact, lambda manifest, _: manifest)
    assert not executor.refresh()
    tiny.with_compiled(own_artifact, "stub", ["decode-b1-q1"])
    assert executor.refresh()
    assert not executor.refresh()
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, source_digest="other"))
    assert not executor.refresh()


def test_what_is_published_while_the_artifact_is_opened_is_seen_later(tiny, own_artifact, stub, monkeypatch):
    read = artifact_module.decode

    def publish_meanwhile(data, where):
        monkeypatch.setattr(artifact_module, "decode", read)
        tiny.with_compiled(own_artifact, "stub")
        return read(data, where)

    monkeypatch.setattr(artifact_module, "decode", publish_meanwhile)
    executor = Executor(Artifact.open(own_artifact))
    assert set(executor.backends.values()) == {"eager"}
    assert executor.refresh()
    assert set(executor.backends.values()) == {"stub"}


def test_prefer_eager_stays_eager(tiny, own_artifact, stub):
    executor = Executor(Artifact.open(own_artifact), prefer_eager=True)
    tiny.with_compiled(own_artifact, "stub")
    assert not executor.refresh()
    assert set(executor.backends.values()) == {"eager"}


def test_a_directory_built_anew_from_other_weights_is_left_alone(tiny, tmp_path, own_artifact, stub, caplog):
    """Its executables would run over the old weights, or over pools of other sizes."""
    executor = Executor(Artifact.open(own_artifact))
    before = step(executor, ALL[0])["tokens"]
    tiny.built(tiny.planned(tiny.write_checkpoint(tmp_path / "other", seed=5), backend="stub"), own_artifact)
    with caplog.at_level(logging.WARNING, module.__name__):
        assert not executor.refresh()
    assert "built anew from other weights" in caplog.text
    assert set(executor.backends.values()) == {"eager"}
    assert step(executor, ALL[0])["tokens"] == before
    assert not executor.refresh()


def test_executables_of_another_toolchain_are_not_loaded(tiny, own_artifact, stub):
    executor = Executor(Artifact.open(own_artifact))
    toolchain = {**executor.artifact.manifest.toolchain, "torch": "1.0"}
    tiny.with_compiled(own_artifact, "stub", toolchain=toolchain)
    with pytest.raises(ArtifactStale, match=r"torch was '1\.0' and is"):
        executor.refresh()
    assert set(executor.backends.values()) == {"eager"}


def test_a_bucket_whose_graph_changed_keeps_the_one_it_has(tiny, own_artifact, stub):
    executor = Executor(Artifact.open(own_artifact))

    def change(manifest, writer):
        first, *rest = manifest.graphs
        other = writer.add("graphs", b"another graph", "graph")
        return replace(manifest, graphs=(replace(first, eager=other), *rest))

    tiny.published(own_artifact, change)
    tiny.with_compiled(own_artifact, "stub")
    changed = executor.artifact.manifest.graphs[0].bucket
    assert executor.refresh()
    assert executor.backends == {bucket.name: "eager" if bucket == changed else "stub" for bucket in ALL}


def test_what_cannot_be_loaded_is_told_once_and_the_old_executables_go_on(tiny, own_artifact, stub):
    executor = Executor(Artifact.open(own_artifact))

    def change(manifest, writer):
        first, *rest = manifest.graphs
        file = writer.add("graphs", b"no graph", "stub")
        return replace(manifest, graphs=(replace(first, compiled=tiny.Compiled("stub", file, "key")), *rest))

    tiny.published(own_artifact, change)
    with pytest.raises(LoweringError):
        executor.refresh()
    assert not executor.refresh()
    assert set(executor.backends.values()) == {"eager"}
    step(executor, ALL[0])
    step(executor, executor.artifact.manifest.graphs[0].bucket)


def test_a_tampered_executable_is_not_swapped_in(tiny, own_artifact, stub):
    executor = Executor(Artifact.open(own_artifact))

    def change(manifest, writer):
        first, *rest = manifest.graphs
        file = writer.add("graphs", (own_artifact / first.eager).read_bytes() + b"\0", "stub")
        return replace(manifest, graphs=(replace(first, compiled=tiny.Compiled("stub", file, "key")), *rest))

    newer = tiny.published(own_artifact, change)
    file = own_artifact / newer.manifest.graphs[0].compiled.file
    tiny.tampered(file)
    with pytest.raises(ArtifactTampered, match=file.name):
        executor.refresh()
    assert set(executor.backends.values()) == {"eager"}


# --- nothing is traced or compiled ---


def test_the_counter_sees_a_trace(tiny, tiny_checkpoint, tiny_artifact):
    made = tiny.planned(tiny_checkpoint)
    executor = Executor(Artifact.open(tiny_artifact))
    step(executor, ALL[0])
    assert executor.compiles() == 0
    tiny.stages.stage(made, ALL[0])
    assert executor.compiles() > 0
    assert Executor(executor.artifact).compiles() == 0


def test_the_counter_sees_a_compile_and_a_compiler(monkeypatch, executor):
    counted = executor.compiles()
    events.record("compile")
    assert executor.compiles() == counted + 1
    for name in module.COMPILERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    fresh = Executor(executor.artifact)
    assert fresh.compiles() == 0
    monkeypatch.setitem(sys.modules, module.COMPILERS[0], torch)
    assert fresh.compiles() == 1


# --- one rank of several ---


def test_an_artifact_for_several_devices_needs_a_rank(sharded):
    artifact = Artifact.open(sharded("dp=2,tp=2"))
    with pytest.raises(SpecError, match=r"is for mesh dp=2,tp=2: it runs as 4 ranks, a process each, and not in this one alone"):
        Executor(artifact)
    with pytest.raises(SpecError, match=r"rank 4 of mesh dp=2,tp=2; legal is 0 to 3"):
        Executor(artifact, rank=4)


def test_a_rank_holds_its_part_and_knows_where_it_is(sharded):
    artifact, alone = Artifact.open(sharded("dp=2,tp=2")), Executor(Artifact.open(sharded("")))
    held = [Executor(artifact, rank=rank) for rank in range(4)]
    assert [one._own["coords"].tolist() for one in held] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    # Each dp group has pools of its own; within a group they are split by heads.
    assert {one.state_bytes for one in held} == {alone.state_bytes // 2}
    whole = artifact.load_weights()
    names = [leaf.name for leaf in artifact.manifest.params]
    experts = next(leaf.name for leaf in artifact.manifest.params if leaf.aval.axes[0] == "experts")
    parts, rows = ([one._params[names.index(name)] for one in held] for name in (experts, "params.embed"))
    assert torch.equal(torch.cat(parts), whole[experts])
    assert torch.equal(torch.cat(rows[:2]), whole["params.embed"])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])


def test_where_a_rank_is_reaches_its_graph(sharded):
    executor = Executor(Artifact.open(sharded("tp=2")), rank=1)
    seen = []
    executor._executables[ALL[0]] = lambda operands: seen.append(operands[-1]) or [torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1)]
    step(executor, ALL[0])
    assert executor._names[ALL[0]][-1] == "coords"
    assert seen[0].tolist() == [0, 1]
    assert seen[0].dtype == torch.int32
