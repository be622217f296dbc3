"""lowering/backends/inductor/sizes.py: what two graphs say of all of their kind, against graphs that were lowered for other sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import oracle
from torch._inductor import codecache
from torch.fx import GraphModule, Interpreter

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.record import record
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Bucket, Limits, Mesh, Rules
from npucompile.lowering.backends.inductor import aoti, native, sizes
from npucompile.lowering.backends.inductor.sizes import CommonGraph
from npucompile.lowering.lower import LoweredProgram, lower_bodies
from npucompile.models.step import program

RULES = oracle.LIMITS.with_bitmasks(8, 97).with_adjustments(8, 97)
DRAFTING = replace(RULES, drafts=3, slots_per_request=4)
SIZES = ({"rows": 2, "tokens": 116}, {"rows": 46, "tokens": 148})


@cache
def lowered(
    bucket: Bucket, limits: Limits = RULES, kinds: str = "lf", dtype: torch.dtype = torch.bfloat16, experts: int = 0
) -> LoweredProgram:
    chosen = {"num_experts": experts, "num_experts_per_tok": 2} if experts else {}
    model = oracle.build(oracle.settings(kinds, **chosen)).model
    return lower_bodies(optimise(partition(trace(program(model, bucket, limits, dtype)), Mesh(), Rules())), "inductor")


def sizes_of(one: LoweredProgram) -> sizes.Sizes:
    return sizes.sizes_of(one.bucket, one.signature)


def common(bucket: Bucket, dtype: torch.dtype = torch.bfloat16, experts: int = 0) -> CommonGraph:
    # Not from the cache: bodies of these get an operand more.
    both = [lowered.__wrapped__(each, dtype=dtype, experts=experts) for each in sizes.samples(bucket)]
    return CommonGraph.of([each.graph for each in both], [sizes_of(each) for each in both])


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("bucket", [Bucket("decode", 1, 1), Bucket("prefill", 1, 32)], ids=lambda bucket: bucket.kind)
def test_every_bucket_of_a_kind_is_what_two_others_say(bucket: Bucket, dtype: torch.dtype) -> None:
    kind = common(bucket, dtype=dtype)
    for rows in (1, 3, 9, 64, 65):
        for width in (1,) if bucket.kind == "decode" else (7, 128):
            other = lowered(Bucket(bucket.kind, rows, width), dtype=dtype)
            assert kind.holds(other.graph, sizes_of(other)), other.bucket.name


def test_a_graph_of_another_kind_is_none_of_them() -> None:
    kind, other = common(Bucket("decode", 1, 1)), lowered(Bucket("prefill", 4, 32))
    assert not kind.holds(other.graph, sizes_of(other))
    own = lowered(Bucket("decode", 4, 1))
    assert kind.holds(own.graph, sizes_of(own))
    assert not kind.holds(own.graph, {**sizes_of(own), "rows": 5})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_with_experts_are_one_kind_whatever_the_number_of_rows(dtype: torch.dtype) -> None:
    kind = common(Bucket("prefill", 1, 32), dtype, experts=4)
    for tokens in (4, 128):
        other = lowered(Bucket("prefill", 2, tokens), dtype=dtype, experts=4)
        assert kind.holds(other.graph, sizes_of(other))


def test_bodies_that_lack_a_size_get_an_operand_that_has_it() -> None:
    bucket = Bucket("prefill", 1, 32)
    both = [lowered.__wrapped__(each) for each in sizes.samples(bucket)]
    before = {name: len(getattr(both[0].graph, name).graph.find_nodes(op="placeholder")) for name in sizes.called(both[0].graph)}
    CommonGraph.of([each.graph for each in both], [sizes_of(each) for each in both])
    for name, count in before.items():
        bodies = [getattr(each.graph, name) for each in both]
        assert not sizes.needed(sizes.made_of(bodies, all_sizes(both))), name
        more = len(bodies[0].graph.find_nodes(op="placeholder")) - count
        calls = [node for node in both[0].graph.graph.nodes if node.op == "call_module" and node.target == name]
        assert more in (0, 1)
        assert all(len(call.args) == count + more for call in calls)
    assert any(len(getattr(both[0].graph, name).graph.find_nodes(op="placeholder")) > count for name, count in before.items())


def all_sizes(both: list[LoweredProgram]) -> list[sizes.Sizes]:
    return [sizes_of(each) for each in both]


@given(factor=st.integers(1, 10**6), names=st.sampled_from([("rows",), ("tokens",), ("rows", "tokens")]), rows=st.integers(1, 4096))
def test_a_number_is_known_by_its_two_values(factor: int, names: tuple[str, ...], rows: int) -> None:
    def value(of: sizes.Sizes) -> int:
        product = factor
        for name in names:
            product *= of[name]
        return product

    assert sizes.product([value(each) for each in SIZES], SIZES) == (factor, names)


@pytest.mark.parametrize("values", [(3, 47), (1, 2), (2, 47), (116, 46)])
def test_a_number_that_is_no_multiple_of_sizes_is_refused(values: tuple[int, int]) -> None:
    with pytest.raises(LoweringError, match=f"a number is {values[0]} for sizes"):
        sizes.product(values, SIZES)
    assert sizes.product((5, 5), SIZES) is None


def fold(rows: int, tokens: int) -> GraphModule:
    """[rows, tokens] and [rows tokens, 3] -> sums over the tokens of each row."""

    def run(ids: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [(x.view(rows, tokens, 3) * ids[:, :, None]).sum(1), torch.arange(rows) * tokens]

    from torch._subclasses.fake_tensor import FakeTensorMode

    like = [torch.empty(rows, tokens, device="meta"), torch.empty(rows * tokens, 3, device="meta")]
    return record(run, like, FakeTensorMode(), "cpu")


@given(rows=st.integers(1, 5), tokens=st.integers(1, 5))
def test_the_graph_with_values_computes_what_that_of_the_sizes_does(rows: int, tokens: int) -> None:
    graph, operands = sizes.with_values([fold(2, 116), fold(46, 148)], SIZES)
    assert [len(operand.shape) for operand in operands] == [2, 2]
    values = [torch.randn(rows, tokens), torch.randn(rows * tokens, 3)]
    expected = Interpreter(fold(rows, tokens)).run(*values)
    for ours, theirs in zip(Interpreter(graph).run(*values), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_one_graph_alone_stays_what_it_is() -> None:
    graph, operands = sizes.with_values([fold(2, 116)], [{}])
    assert [tuple(operand.shape) for operand in operands] == [(2, 116), (232, 3)]
    assert "sym_size" not in str(graph.graph)
    sizes.check_unguarded(operands)


def test_code_that_takes_a_token_off_holds_for_every_chunk() -> None:
    """As drafts do in a prefill step; whether one token is left is a condition that compilers ask for."""

    def shifted(rows: int, tokens: int) -> GraphModule:
        like = [torch.empty(rows, tokens, device="meta")]
        return record(lambda ids: [torch.cat([ids[:, 1:], ids[:, :1]], 1)], like, FakeTensorMode(), "cpu")

    from torch._subclasses.fake_tensor import FakeTensorMode

    _, operands = sizes.with_values([shifted(2, 116), shifted(46, 148)], SIZES)
    with operands[0].fake_mode:  # type: ignore[attr-defined]
        assert bool(operands[0][:, 1:].shape[1] != 1)
    sizes.check_unguarded(operands)


def test_code_that_sorts_holds_for_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows are sorted by their experts; torch's own rule asks whether there are fewer than 32,767."""

    def ordered(rows: int, tokens: int) -> GraphModule:
        like = [torch.empty(rows, tokens, device="meta")]
        return record(lambda ids: [ids.flatten().argsort(stable=True)], like, FakeTensorMode(), "cpu")

    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(native, "archive", lambda *_: tmp_path / "native" / "kernels.a")
    monkeypatch.setattr(codecache.AotCodeCompiler, "compile", Mock(side_effect=KeyboardInterrupt))
    graph, operands = sizes.with_values([ordered(2, 116), ordered(46, 148)], SIZES)
    with pytest.raises(KeyboardInterrupt):
        aoti.compile_files(graph, operands, "g_1", cache_dir=tmp_path, threads=0)
    sizes.check_unguarded(operands)
