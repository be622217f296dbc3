"""tools/builder/pool.py: jobs of the pool, and the operators of the full-size model's GE graph."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch
from support import tiny

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.trace import signature_of
from npucompile.graphs.types import Bucket
from npucompile.lowering import collectives_check
from npucompile.lowering.artifact.graph_io import encode
from npucompile.lowering.ascend import inspect_ge
from npucompile.lowering.ascend.ge_file import decode
from npucompile.lowering.ascend.shipped import GE
from npucompile.lowering.backend import CompiledFile, GraphPart, GraphParts
from npucompile.models import step
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder import pool, stages
from npucompile.tools.builder.pool import CompileJob

BIG = "qwen3.5-397b"
FULL, LINEAR = "full_attention", "linear_attention"
TAKE, OWN, DRAFT = "extend_draft_cache", "extend_draft_cache_own", "draft"


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """The smallest published decode bucket of the full-size model, at its default deployment: (plan, result, ge_file)."""
    cache = tmp_path_factory.mktemp("cache")
    plan = planning.plan(planning.Options(BIG, buckets=(2,), max_num_seqs=54))
    result = tiny.quietly(pool.run, CompileJob(plan, plan.buckets[-1], cache))
    return plan, result, decode(result.compiled.data)


def kind_of(body):
    """Kind of layer, or pass of the draft head, that a body was made of; bodies of one kind are numbered."""
    return next((kind for kind in (FULL, LINEAR, OWN, TAKE, DRAFT) if kind in body), body)


@pytest.fixture(scope="module")
def census(lowered):
    """Operators by type, of every kind of body; all bodies of a kind are alike."""
    bodies = inspect_ge.census_by_body(lowered[2].graph)
    counts_by_kind = {}
    for body, counts in bodies.items():
        assert counts_by_kind.setdefault(kind_of(body), counts) == counts, f"{body} is made of other operators than those before it"
    return counts_by_kind, Counter(kind_of(body) for body in bodies)


def test_the_census_of_each_kind_of_layer_is_the_golden_one(census, golden):
    counts_by_kind, bodies = census
    lines = []
    for kind, counts in sorted(counts_by_kind.items()):
        lines += [f"{kind or 'main graph'} x {bodies[kind]}", *(f"  {name:<28} {count}" for name, count in sorted(counts.items())), ""]
    golden("qwen3.5-397b_decode_census", "\n".join(lines))


def test_each_layer_gathers_and_scatters_once(census):
    """docs/sharding.md: with the stream split by tokens a layer needs one gather and one scatter beside the experts' exchange."""
    counts_by_kind, _ = census
    for kind in (FULL, LINEAR):
        talks: Counter[str] = Counter()
        for name, count in counts_by_kind[kind].items():
            talks[collectives_check.COLLECTIVES.get(name, "")] += count
        del talks[""]
        assert talks == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "moe_dispatch": 1, "moe_combine": 1}, kind


def test_what_is_told_of_the_full_bucket_is_what_the_file_holds(lowered):
    plan, result, ge_file = lowered
    assert result.job.bucket == plan.buckets[-1] == Bucket("decode", 2, 4)
    assert result.compiled.census == GE.census(ge_file)
    assert result.staged.collectives == collectives_check.of_ge_file(ge_file)
    collectives_check.check_ranks(collectives_check.expand(result.staged.collectives, plan.mesh))
    assert {group for _, group, _ in result.staged.collectives} == {"tp", "world"}
    assert result.staged.memory.params_bytes == plan.params_bytes
    assert result.staged.memory.state_bytes == plan.state_bytes
    assert result.seconds > 0
    # Every pool is written where it lies, by an operator or through an output that is bound to it.
    pools = len(signature_of(step.program(plan.model, plan.buckets[-1], plan.limits, plan.dtype)).state)
    first = ge_file.inputs - len(result.staged.inputs) - pools
    written = {*ge_file.bound, *(operand for _, operand in ge_file.donations)}
    assert written == set(range(first, first + pools))


def test_texts_of_the_full_bucket_are_short_and_whole(lowered):
    _, result, _ = lowered
    texts = stages.unpack_texts(result.staged.texts)
    assert set(texts) == {"partitioned", "lowered"}
    # Sixty layers of two kinds: each kind is told once.
    assert texts["lowered"].count("npu_recurrent_gated_delta_rule_functional") <= 3
    assert texts["lowered"].count("npu_fused_infer_attention_score") <= 2, "of a layer and of the draft head"


# --- small models ---


@pytest.fixture(autouse=True)
def _threads():
    threads, level = torch.get_num_threads(), logging.getLogger("torch").level
    yield
    torch.set_num_threads(threads)
    logging.getLogger("torch").setLevel(level)


def jobs(plan, directory):
    return [CompileJob(plan, bucket, directory) for bucket in plan.buckets]


def test_a_job_and_what_became_of_it_cross_processes(model, tmp_path):
    (job,) = jobs(tiny.planned_device(model, backend="null", buckets=(4,), prefill=None), tmp_path)[-1:]
    assert pickle.loads(pickle.dumps(job)) == job
    result = pool.run(job)
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize("scheme", ["none", "w4a8"])
def test_weights_are_multiplied_as_they_are_held(model, tmp_path, scheme):
    plan = tiny.planned_device(model, quantization=scheme)
    result = tiny.compile_once(CompileJob(plan, plan.buckets[-1], tmp_path))
    fused, dense = result.compiled.census.get("GroupedMatmulSwigluQuantV2", 0), result.compiled.census.get("QuantBatchMatmulV3", 0)
    # Of one full-attention layer two products, and of each shared expert two.
    assert (fused, dense) == ((4, 10) if scheme == "w4a8" else (0, 0))
    # Four layers and the draft head.
    assert result.compiled.census["MoeDistributeDispatchV2"] == 5


def test_a_graph_that_communicates_otherwise_than_its_partition_is_not_kept(model, tmp_path, monkeypatch):
    plan = tiny.planned_device(model)
    other = tiny.compile_once(CompileJob(plan, plan.buckets[-1], tmp_path)).compiled
    monkeypatch.setattr(type(pool.backend("ge")), "compile", lambda *_, **__: other)
    smaller = tiny.planned_device(model, buckets=(2,))
    with pytest.raises(LoweringError, match=r"collective \d+ of the partitioned graph is .* legal is the same list"):
        pool.run(CompileJob(smaller, smaller.buckets[-1], tmp_path))


def test_a_graph_whose_key_is_known_is_not_compiled_again(model, tmp_path, monkeypatch):
    plan = tiny.planned_device(model)
    job = CompileJob(plan, plan.buckets[-1], tmp_path)
    key = tiny.compile_once(job).staged.key
    monkeypatch.setattr(type(pool.backend("ge")), "compile", None)
    assert pool.run(replace(job, known_key=key)).compiled is None


def test_a_lowered_graph_that_is_there_already_is_only_compiled(tiny_checkpoint, tmp_path, monkeypatch):
    plan = tiny.planned(tiny_checkpoint)
    staged = tiny.stage_once(plan, Bucket("decode", 1, 4))
    data = encode(staged.lowered.graph)
    monkeypatch.setattr(pool, "stage", None)
    result = pool.run(CompileJob(plan, staged.bucket, tmp_path, (data, staged.lowered.signature)))
    assert (result.staged, result.compiled.data) == (None, data)


class InThisProcess:
    """A pool whose one process is this one."""

    def __init__(self, *_, **__):
        pass

    def submit(self, run, *arguments):
        future = Future()
        try:
            future.set_result(run(*arguments))
        except LoweringError as error:
            future.set_exception(error)
        return future

    def shutdown(self, **how):
        pass


@pytest.fixture
def in_parts(tiny_checkpoint, tmp_path, monkeypatch):
    """Two jobs of two parts each, of which one is in both; and the data of the parts that are compiled."""
    seen = []

    def compile_part(self, part, **how):
        if part.data == b"bad":
            raise LoweringError("it is bad")
        seen.append(part.data)
        return part.data.upper()

    chosen = type(pool.backend("inductor"))
    monkeypatch.setattr(chosen, "compile_part", compile_part)
    monkeypatch.setattr(chosen, "join", lambda self, parts, compiled, **how: CompiledFile(parts.data + b"".join(compiled)))
    monkeypatch.setattr(pool, "ProcessPoolExecutor", InThisProcess)
    plan, (a, b, c) = tiny.planned(tiny_checkpoint, backend="inductor"), (GraphPart(key, key.encode()) for key in "abc")
    graphs = GraphParts((a, b), b"1"), GraphParts((b, c), b"2")
    return [CompileJob(plan, bucket, tmp_path, graph) for bucket, graph in zip(plan.buckets, graphs, strict=False)], seen


def test_parts_that_several_graphs_have_are_compiled_once(in_parts):
    jobs, seen = in_parts
    results = {result.job.bucket: result for result in pool.run_all(jobs, 2)}
    assert seen == [b"a", b"b", b"c"]
    assert [results[job.bucket].compiled.data for job in jobs] == [b"1AB", b"2BC"]
    assert all(result.staged is None and result.seconds >= 0 for result in results.values())


def test_jobs_are_made_while_others_compile_and_the_last_result_is_known(in_parts):
    jobs, seen = in_parts
    compiled = []

    def made():
        for job in (*jobs, replace(jobs[0], lowered=GraphParts((GraphPart("d", b"d"),), b"3"))):
            compiled.append(len(seen))
            yield job

    results = list(pool.run_all(made(), 2))
    assert compiled == [0, 0, 3], "the third is made when the parts of those before it have been handed out"
    assert results[-1].last


def test_one_process_compiles_graph_by_graph(in_parts):
    jobs, _ = in_parts
    assert [result.compiled.data for result in pool.run_all(jobs, 1)] == [b"1AB", b"2BC"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_part_that_cannot_be_compiled_is_told_with_its_bucket(in_parts, workers):
    jobs, _ = in_parts
    jobs[1] = replace(jobs[1], lowered=GraphParts((GraphPart("bad", b"bad"),), b""))
    with pytest.raises(LoweringError, match=f"inductor could not compile {jobs[1].bucket.name}: it is bad"):
        list(pool.run_all(jobs, workers))


def test_this_process_makes_the_last_graphs_while_another_makes_the_first(model, tmp_path, monkeypatch):
    plan, here, made, rest_is_made = tiny.planned_device(model, backend="null"), threading.get_ident(), [], threading.Event()

    def run(job):
        if threading.get_ident() == here:
            made.append(job.bucket)
            if len(made) == len(plan.buckets) - 1:
                rest_is_made.set()
        else:
            assert rest_is_made.wait(60)
        return job

    monkeypatch.setattr(pool, "run", run)
    monkeypatch.setattr(pool, "ProcessPoolExecutor", lambda workers, **how: ThreadPoolExecutor(workers))
    results = [job.bucket for job in pool.run_all(jobs(plan, tmp_path), 2)]
    assert made == list(plan.buckets[:0:-1])
    assert results == [*made, plan.buckets[0]]


@pytest.mark.parametrize(("cann", "start"), [(None, "spawn"), ("this machine has no CANN", "fork")])
def test_processes_have_what_is_loaded_here_where_no_library_has_threads(model, tmp_path, monkeypatch, cann, start):
    plan, asked = tiny.planned_device(model, backend="null"), []
    monkeypatch.setattr(type(pool.backend("null")), "runs_here", lambda self: cann)
    monkeypatch.setattr(pool, "run", lambda job: job)
    monkeypatch.setattr(
        pool, "ProcessPoolExecutor", lambda most, **how: asked.append((most, how["mp_context"])) or ThreadPoolExecutor(most)
    )
    assert len(list(pool.run_all(jobs(plan, tmp_path), 64))) == len(plan.buckets)
    assert [(most, context.get_start_method()) for most, context in asked] == [(len(plan.buckets) - 1, start)]


def test_a_process_is_as_nice_as_it_is_asked_to_be_at_least(model, tmp_path, monkeypatch):
    niceness = [3]
    monkeypatch.setattr(os, "getpriority", lambda which, who: niceness[-1])
    monkeypatch.setattr(os, "setpriority", lambda which, who, value: niceness.append(value))
    monkeypatch.setattr(pool, "_compile", lambda job: (None, None))
    for nice in (0, 10, 10, 5):
        pool.run(CompileJob(tiny.planned_device(model, backend="null"), Bucket("decode", 4, 2), tmp_path, nice=nice))
    assert niceness == [3, 10]


class Killed:
    """A pool whose processes are killed from outside."""

    def __init__(self, *_, **__):
        pass

    def submit(self, run, job):
        future = Future()
        future.set_exception(BrokenProcessPool("terminated abruptly"))
        return future

    def shutdown(self, **how):
        assert how == {"wait": True, "cancel_futures": True}


def test_a_killed_process_is_told_with_what_to_do(model, tmp_path, monkeypatch):
    plan = tiny.planned_device(model, backend="null")
    monkeypatch.setattr(pool, "ProcessPoolExecutor", Killed)
    with pytest.raises(LoweringError, match=r"one of up to 2 processes that compile was killed.*--jobs 1"):
        list(pool.run_all(jobs(plan, tmp_path), 2))


def test_this_process_is_left_one_thread_and_a_quiet_torch(model, tmp_path):
    """As processes of the pool are; they end afterwards."""
    torch.set_num_threads(2)
    plan = tiny.planned_device(model, backend="null", buckets=(4,))
    pool.run(jobs(plan, tmp_path)[-1])
    assert torch.get_num_threads() == 1
    assert logging.getLogger("torch").level == logging.ERROR
    assert os.listdir(tmp_path) == []
