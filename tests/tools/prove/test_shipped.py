"""tools/prove/shipped.py: GE graphs on disk are checked against the manifest, the memory plan and their small image."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support import ranks
from support import small_images as images

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.types import Aval, Leaf, Mesh
from npucompile.lowering.ascend import prefetch
from npucompile.lowering.ascend import shipped as encodings
from npucompile.lowering.ascend.ge_file import operators, parse
from npucompile.lowering.ascend.shipped import CAPTURED
from npucompile.lowering.collectives_check import expand
from npucompile.lowering.platform import Platform
from npucompile.tools.prove import shipped


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return images.shipped(ranks.SIZES, tmp_path_factory)


@pytest.fixture
def decode_entry(artifact):
    (entry,) = (entry for entry in artifact.manifest.graphs if entry.bucket.kind == "decode")
    return entry


read_ge_file = shipped.shipped_file


def edited(ge_file, change):
    """A GE file whose operators were changed by hand."""
    model = parse(ge_file.graph)
    change({op.name: op for op in operators(model)}, model)
    return replace(ge_file, graph=model.SerializeToString(deterministic=True))


def shipping(monkeypatch, change):
    """Changes the artifact's GE files as they are read."""
    monkeypatch.setattr(shipped, "shipped_file", lambda artifact, entry: edited(read_ge_file(artifact, entry), change))


def test_what_was_built_is_accepted(artifact):
    measured = shipped.check_manifest(artifact.manifest)
    assert measured["operands"] == len(artifact.manifest.params) + len(artifact.manifest.state)
    assert 0 < measured["needed_gib"] < measured["limit_gib"] == 64
    for entry in artifact.manifest.graphs:
        measured = shipped.check_entry(artifact, entry)
        assert measured == {
            "operators": sum(entry.census.values()),
            "collectives": len(entry.collectives),
            "pools": len(artifact.manifest.state),
        }
    assert shipped.check_patched(artifact) == {"ranks": 4, "buckets": 2, "patched": 2}


def test_another_operand_is_refused(artifact):
    first, *rest = artifact.manifest.params
    wider = Leaf(first.name, Aval((first.aval.shape[0] + 1, *first.aval.shape[1:]), first.aval.dtype, first.aval.axes))
    with pytest.raises(VerifyError, match=rf"an operand is {first.name}, bf16\[261,32\] .*; the model's is {first.name}, bf16\[260,32\]"):
        shipped.check_manifest(replace(artifact.manifest, params=(wider, *rest)))
    with pytest.raises(VerifyError, match=r"\d+ parameters and pools; the model has \d+"):
        shipped.check_manifest(replace(artifact.manifest, state=artifact.manifest.state[:-1]))
    with pytest.raises(VerifyError, match="the model's is"):
        shipped.check_manifest(replace(artifact.manifest, formats={"rules": [["*.self_attn.?_proj", "w8a8_dynamic"]]}))


def test_another_layout_is_refused(artifact):
    rules = {**artifact.manifest.rules, "vocab": ("dp",)}
    with pytest.raises(VerifyError, match=r"rules are .*'vocab': \('dp',\).*; those of mesh dp=2,tp=2 are"):
        shipped.check_manifest(replace(artifact.manifest, rules=rules))


def test_a_memory_plan_of_less_than_the_operands_is_refused(artifact):
    memory = artifact.manifest.memory
    parts = [{**part, "nbytes": part["nbytes"] - 1} if part["name"] == "KV pages" else part for part in memory["parts"]]
    with pytest.raises(VerifyError, match=r"memory plan: KV pages takes \d+ bytes; the manifest's operands take \d+"):
        shipped.check_manifest(replace(artifact.manifest, memory={**memory, "parts": parts}))
    parts = [{**part, "nbytes": 2**37} if part["name"] == "runtime" else part for part in memory["parts"]]
    with pytest.raises(VerifyError, match=r"memory plan: \d+ bytes of \d+; legal is at most"):
        shipped.check_manifest(replace(artifact.manifest, memory={**memory, "parts": parts}))
    with pytest.raises(VerifyError, match="memory plan"):
        shipped.check_manifest(replace(artifact.manifest, memory={**memory, "limit_bytes": 2**40}))


def test_another_census_is_refused(artifact, decode_entry):
    census = {**decode_entry.census, "MatMul": decode_entry.census["MatMul"] + 1}
    with pytest.raises(
        VerifyError,
        match=r"decode-b4-q2 shipped: the graph and the manifest count other operators: \[\('MatMul', \d+\), \('MatMul', \d+\)\]",
    ):
        shipped.check_entry(artifact, replace(decode_entry, census=census))


def test_another_list_of_collectives_is_refused(artifact, decode_entry):
    first, second, *rest = decode_entry.collectives
    with pytest.raises(VerifyError, match="decode-b4-q2 shipped: collective 0 of the partitioned graph is"):
        shipped.check_entry(artifact, replace(decode_entry, collectives=(second, first, *rest)))


def test_a_graph_that_copies_its_state_or_has_a_collective_of_another_group_is_refused(artifact, decode_entry, monkeypatch):
    def elsewhere(ops, model):
        next(op for op in ops.values() if op.type == "HcomReduceScatter").attr["group"].s = b"dp"

    def loose(ops, model):
        next(op for op in ops.values() if op.type == "ScatterPaKvCache").input[1] = ""

    for change in (elsewhere, loose):
        shipping(monkeypatch, change)
        with pytest.raises(VerifyError, match="decode-b4-q2 shipped: "):
            shipped.check_entry(artifact, decode_entry)


def test_a_bucket_without_a_graph_is_refused(artifact, decode_entry):
    with pytest.raises(VerifyError, match="decode-b4-q2: the artifact has no GE graph of it"):
        shipped.check_entry(artifact, replace(decode_entry, compiled=None))


def test_ranks_that_would_wait_for_ever_are_found_in_what_they_load(artifact, monkeypatch):
    def patched(ge_file, rank, groups):
        def swap(ops, model):
            talking = [op for op in ops.values() if op.type.startswith("Hcom")]
            for op in talking[:1] if rank == 2 else ():
                op.attr["group"].s = groups["dp"].encode()

        return edited(real(ge_file, rank, groups), swap)

    real = encodings.patched
    monkeypatch.setattr(encodings, "patched", patched)
    with pytest.raises(VerifyError, match=r"(decode|prefill)-\S+ on all ranks: "):
        shipped.check_patched(artifact)


def test_a_rank_patched_with_another_rank_number_is_found(artifact, monkeypatch):
    real = encodings.patched
    monkeypatch.setattr(encodings, "patched", lambda ge_file, rank, groups: real(ge_file, 0, groups))
    with pytest.raises(VerifyError, match=r"rank 1: \S+ has ep_rank_id 0; its place in 'dispatch:0' is 1"):
        shipped.check_patched(artifact)


def test_the_collectives_that_ranks_load_are_those_of_the_manifest(artifact, decode_entry):
    collectives = shipped.rank_collectives(read_ge_file(artifact, decode_entry), artifact.manifest)
    assert collectives == expand(decode_entry.collectives, Mesh.parse(artifact.manifest.mesh))


def test_more_layers_repeat_the_middle():
    small = [("gather", "tp"), ("scatter", "tp"), ("dispatch", "world"), ("scatter", "tp"), ("dispatch", "world"), ("gather", "dp")]
    for more in (1, 2, 13):
        shipped._check_collectives("it", [*small[:1], *small[1:3] * more, *small[1:]], small, (more,))
    shipped._check_collectives("it", small, small, (0,))
    long = [*small[:1], *small[1:3] * 4, *small[1:]]
    for wrong, periods in (
        (small[:-1], 0),
        (small[::-1], 0),
        (long, 3),
        (long, 0),
        (long[:-1], 4),
        ([*long[:-1], ("gather", "tp")], 4),
        ([*long[:2], *long[1:]], 4),
    ):
        with pytest.raises(VerifyError, match=r"it: collectives are .* more periods of layers"):
            shipped._check_collectives("it", wrong, small, (periods,))


def test_more_layers_of_two_kinds_repeat_two_parts():
    dense, experts = [("gather", "tp"), ("scatter", "tp")], [("gather", "tp"), ("dispatch", "world")]
    small = [*dense, *experts * 2, ("gather", "dp")]
    repeats = shipped._repeats(("d",) * 3 + ("e",) * 7, ("d", "e", "e"))
    assert repeats == (2, 5)
    shipped._check_collectives("it", [*dense * 3, *experts * 7, ("gather", "dp")], small, repeats)
    for wrong in (
        [*dense * 2, *experts * 8, ("gather", "dp")],
        [*dense * 3, *experts * 6, *dense, ("gather", "dp")],
        [*experts * 7, *dense * 3, ("gather", "dp")],
    ):
        with pytest.raises(VerifyError, match=r"those of 2 and 5 more periods of layers"):
            shipped._check_collectives("it", wrong, small, repeats)


def test_a_graph_of_other_operators_than_the_small_one_is_refused(artifact, decode_entry, monkeypatch):
    ge_file = read_ge_file(artifact, decode_entry)
    form = SimpleNamespace(kind="decode")
    case = shipped.BucketCase(decode_entry.bucket, form, (decode_entry,))
    monkeypatch.setattr(shipped.shrink, "layers", len)
    small = SimpleNamespace(collectives=decode_entry.collectives)
    measured = shipped.check_small_bucket(artifact, case, small, ge_file)
    # Two kinds of layers, the two parts of the draft head, and the three stretches around them.
    assert measured == {"buckets": 1, "kinds": 7, "collectives": len(decode_entry.collectives)}
    monkeypatch.setattr(prefetch, "LEAST_BYTES", 1)
    fetches = prefetch.in_ge(ge_file, Mesh.parse(artifact.manifest.mesh), Platform("ascend910_93", "9.1", prefetch=True))
    assert fetches.overlaps
    assert shipped.check_small_bucket(artifact, case, small, fetches) == measured, "what fetches gives nothing"

    def change(ops, model):
        next(op for op in ops.values() if op.type == "SwiGlu").type = "GeGlu"

    with pytest.raises(
        VerifyError, match=r"decode-b4-q2 shipped, decode-b4-q2 small: kinds of layers have other operators: small has .*GeGlu"
    ):
        shipped.check_small_bucket(artifact, case, small, edited(ge_file, change))
    with pytest.raises(VerifyError, match="decode-b4-q2 small: collective"):
        shipped.check_small_bucket(artifact, case, SimpleNamespace(collectives=decode_entry.collectives[1:]), ge_file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"written": (0,)}, "shipped: the graph writes params"),
        ({"outputs": 9}, "results; its signature has"),
    ],
)
def test_a_captured_graph_that_writes_or_returns_something_else_is_refused(tmp_path_factory, monkeypatch, change, message):
    artifact = images.shipped(ranks.SIZES, tmp_path_factory, backend="aclgraph")
    (entry,) = (entry for entry in artifact.manifest.graphs if entry.bucket.kind == "decode")
    assert shipped.check_entry(artifact, entry)["collectives"] == len(entry.collectives)
    right = shipped.shipped_file(artifact, entry)
    monkeypatch.setattr(shipped, "shipped_file", lambda artifact, entry: replace(right, **change))
    with pytest.raises(VerifyError, match=message):
        shipped.check_entry(artifact, entry)


def test_ranks_of_captured_graphs_run_the_collectives_of_the_manifest(tmp_path_factory):
    artifact = images.shipped(ranks.SIZES, tmp_path_factory, backend="aclgraph")
    entry = artifact.manifest.graphs[0]
    talks = shipped.rank_collectives(shipped.shipped_file(artifact, entry), artifact.manifest)
    assert talks == expand(entry.collectives, Mesh.parse("dp=2,tp=2"))
    kinds = CAPTURED.launched(shipped.shipped_file(artifact, entry))
    assert {"linear_attention", "full_attention"} <= set(kinds)
    assert "aten.view.default" not in kinds["full_attention"]
