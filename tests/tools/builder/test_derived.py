"""tools/builder/derived.py: buckets of an NPU whose graphs follow from those of others of their kind."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from support import tiny

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.backend import backend
from npucompile.tools.builder import derived, pool
from npucompile.tools.builder.pool import CompileJob

BUCKETS = (2, 8, 10, 12, 14, 18, 20)
"""Of two rows fewer have bitmasks than of eight and more, so that it is no part of the kind."""
ONE_LAYER = {**tiny.NPU_SIZES, "num_hidden_layers": 1, "layer_types": ["full_attention"]}


class Said:
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "npu", **ONE_LAYER)


@pytest.fixture
def ran(monkeypatch):
    """Rows of the decode buckets whose jobs ran, and by rows what is changed in their results."""
    rows, changes = [], {}

    def run(job):
        result = tiny.compile_once(job)
        rows.extend([job.bucket.batch] * (job.bucket.kind == "decode"))
        return changes.get(job.bucket.batch, lambda same: same)(result)

    monkeypatch.setattr(pool, "run", run)
    monkeypatch.setattr(derived, "LEAST", len(BUCKETS) - 1)
    monkeypatch.setattr(derived, "DRAWN", 1)
    return rows, changes


def planned(model, **options):
    return tiny.planned_device(model, buckets=BUCKETS, max_num_seqs=BUCKETS[-1], **options)


def results(plan, tmp_path, *, known=""):
    """(results by bucket, what was said)."""
    jobs, said = [CompileJob(plan, bucket, tmp_path, known_key=known) for bucket in plan.buckets], Said()
    backend(plan.backend).prepare(tmp_path)
    found = list(derived.results(plan, jobs, (), 1, lambda bucket: tiny.stage_once(plan, bucket).partitioned.signature, said))
    assert sorted(result.job.bucket.name for result in found) == sorted(bucket.name for bucket in plan.buckets)
    return {result.job.bucket: result for result in found}, said.lines


def test_what_follows_is_what_is_made_and_is_proved(model, tmp_path, ran, monkeypatch):
    plan, proved = planned(model), []
    prove = type(backend("ge")).prove

    def noted(self, compiled, claims, platform):
        proved.append(claims)
        prove(self, compiled, claims, platform)

    for bucket in plan.buckets:
        tiny.compile_once(CompileJob(plan, bucket, tmp_path))
    monkeypatch.setattr(type(backend("ge")), "prove", noted)
    found, said = results(plan, tmp_path)
    followed = [bucket for bucket in plan.buckets if bucket.kind == "decode" and bucket.batch not in ran[0]]
    assert (said, len(proved)) == ([], len(followed))
    assert followed
    for bucket, claims in zip(followed, proved, strict=True):
        made, partitioned = tiny.compile_once(found[bucket].job), tiny.stage_once(plan, bucket).partitioned
        assert (found[bucket].staged, found[bucket].compiled) == (made.staged, made.compiled), bucket.name
        assert (claims.signature, claims.collectives) == (partitioned.signature, partitioned.collectives)


@pytest.mark.long
def test_what_follows_of_the_full_size_model_is_what_is_made(tmp_path):
    """With 16 rows an arange over a rank's tokens is that over the bits of a bitmask's word, so that passes merge them."""
    plan = tiny.plan(tiny.Options("qwen3.5-397b", buckets=(8, 12, 16, 20, 26, 32, 44, 52, 60, 64)))
    found, said = results(plan, tmp_path)
    assert said == []
    for bucket in (bucket for bucket in plan.buckets if bucket.kind == "decode"):
        made = tiny.compile_once(CompileJob(plan, bucket, tmp_path))
        assert (found[bucket].staged, found[bucket].compiled) == (made.staged, made.compiled), bucket.name


def changed(result):
    return replace(result, compiled=replace(result.compiled, census={**result.compiled.census, "Add": 9999}))


@pytest.mark.parametrize("drawn", [False, True])
def test_where_one_is_another_graph_each_is_made(model, tmp_path, ran, drawn):
    plan = planned(model)
    (kind,) = derived._kinds(plan, [CompileJob(plan, bucket, tmp_path) for bucket in plan.buckets])
    ran[1][kind.made[3 if drawn else 1]] = changed
    _, said = results(plan, tmp_path)
    assert sorted(ran[0]) == sorted(BUCKETS)
    (line,) = said
    assert ("decode buckets are made one by one: " + (f"decode-b{kind.made[3]}-q2 is another graph" if drawn else "")) in line


def test_where_passes_would_make_less_of_a_bucket_it_is_made(model, tmp_path, ran, monkeypatch):
    plan = planned(model)
    counts = itertools.count()
    monkeypatch.setattr(derived, "_redundant", lambda _: next(counts))
    _, said = results(plan, tmp_path)
    assert (sorted(ran[0]), said) == (sorted(BUCKETS), [])


@pytest.mark.parametrize(
    ("lines", "idle"),
    [
        (["  %2 = aten.arange(4) : i32[4]", "  %3 = aten.arange(8) : i32[8]"], 0),
        (["  %2 = aten.arange(8) : i32[8]", "  %3 = aten.arange(8) : i32[8]"], 1),
        (["  %2 = aten.arange(8) : i32[8]", "", "body x", "  %2 = aten.arange(8) : i32[8]"], 0),
        (["  %2 = npu.pair(%1) : (i32[8], f32[8])", "  %3 = npu.pair(%1) : (i32[8], f32[8])"], 1),
        (["  %1 = aten.neg(%0) : i32[4,2]", "  %2 = aten.view(%1, [8]) : i32[8]"], 0),
        (["  %1 = aten.neg(%0) : i32[8]", "  %2 = aten.view(%1, [8]) : i32[8]"], 1),
        (["  %1 = aten.neg(%0) : i32[8]", "  %2 = aten.abs(%1) : i32[8]"], 0),
        (["  %0 = operand inputs.a : i32[8]", "  %1 = operand inputs.a : i32[8]"], 0),
    ],
)
def test_nodes_that_passes_would_merge_or_drop_are_counted(lines, idle):
    assert derived._redundant({"lowered": "\n".join(["graph", *lines, "  return [%2]"])}) == idle


def test_few_buckets_and_those_that_were_built_before_are_made(model, tmp_path, ran):
    plan = planned(model)
    jobs = [CompileJob(plan, bucket, tmp_path) for bucket in plan.buckets]
    assert derived._kinds(plan, [job for job in jobs if job.bucket.batch < BUCKETS[-1]]) == []
    assert derived._kinds(plan, [replace(job, known_key="before") for job in jobs]) == []
    assert len(derived._kinds(plan, jobs)) == 1


def test_rows_that_ranks_divide_with_another_rest_are_another_kind(model, tmp_path, ran):
    plan = tiny.planned_device(model, buckets=tuple(range(8, 20)), max_num_seqs=19)
    kinds = derived._kinds(plan, [CompileJob(plan, bucket, tmp_path) for bucket in plan.buckets])
    assert [list(kind.jobs) for kind in kinds] == [list(range(8, 20, 2)), list(range(9, 20, 2))]


@pytest.mark.parametrize("way", ["opened", "closed"])
def test_what_is_not_readable_is_made(model, tmp_path, ran, way):
    plan = planned(model, backend="aclgraph")
    assert derived._kinds(plan, [CompileJob(plan, bucket, tmp_path) for bucket in plan.buckets]) == []
    with pytest.raises(LoweringError, match="executables of backend aclgraph are not readable"):
        getattr(backend("aclgraph"), way)(b"")


def test_what_follows_and_is_no_legal_graph_is_made(model, tmp_path, ran, monkeypatch):
    def prove(*_):
        raise LoweringError("not legal")

    plan = planned(model)
    for bucket in plan.buckets:
        tiny.compile_once(CompileJob(plan, bucket, tmp_path))
    monkeypatch.setattr(type(backend("ge")), "prove", prove)
    _, said = results(plan, tmp_path)
    assert (sorted(ran[0]), said) == (sorted(BUCKETS), [])
