"""lowering/ascend/bodies.py: which nodes may be computed elsewhere, and the body that takes their values."""

from __future__ import annotations

import pytest
import torch
from support import ge_bodies as gb
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs.ir.record import record
from npucompile.lowering.ascend.bodies import is_operand, is_plain, recorded, taking

X, G = ((4, 8), gb.F32), ((8,), gb.F32)


@pytest.mark.parametrize(
    ("fn", "plain"),
    [
        (lambda x: x.exp(), True),
        (lambda x: x.t(), True),
        (lambda x: x.add_(1), False),
        (lambda x: torch.rand_like(x), False),
        (lambda x: torch.empty_like(x) if False else x.new_empty(3), False),
        (lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "tp"), False),
    ],
    ids=["exp", "view", "in place", "random", "undefined", "exchange"],
)
def test_what_gives_the_same_values_wherever_it_runs_is_plain(fn: object, plain: bool) -> None:
    graph = gb.trace(FakeTensorMode(), lambda x: (fn(x),), [X])  # type: ignore[operator]
    (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
    assert is_plain(node) == plain


def test_a_body_takes_values_behind_the_operands_that_it_still_reads() -> None:
    graph = gb.trace(FakeTensorMode(), lambda x, g: (x * (g + 1).exp()[:4].view(4, 1), x), [X, G])
    moved = [node for node in graph.graph.nodes if "add" in str(node.target) or "exp" in str(node.target)]
    body, kept = taking(graph, moved[-1:], set(moved))
    assert kept == [0]
    x, g = torch.rand(4, 8), torch.rand(8)
    assert all(torch.equal(a, b) for a, b in zip(body(x, (g + 1).exp()), graph(x, g), strict=True))
    assert [node.meta["val"].shape for node in body.graph.nodes if node.op == "placeholder"] == [(4, 8), (8,)]
    assert taking(graph, (), set()) == (graph, [0, 1]), "a body that loses nothing is itself"


def described(graph: torch.fx.GraphModule) -> list[tuple[object, ...]]:
    """Nodes with their arguments and the layouts of their values."""
    vals = [node.meta.get("val") for node in graph.graph.nodes]
    layouts = [[(v.shape, v.stride(), v.dtype) for v in (val if isinstance(val, tuple) else (val,)) if v is not None] for val in vals]
    return [(node.format_node(), *layout) for node, layout in zip(graph.graph.nodes, layouts, strict=True)]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_body_without_what_moved_is_what_recording_it_gives(transposed: bool) -> None:
    """Names and layouts too: with results that nobody reads, a write in place, and a moved value whose layout changes."""

    def fn(x: torch.Tensor, g: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = (g + 1).exp()
        weight = weight.t() if transposed else weight
        first, _, third = x.split([2, 3, 3], dim=1)
        pool.add_(x[:1])
        return (first @ weight[:2]).relu(), third.t() + 1, pool * 2, weight * 2

    operands = [torch.empty(shape, device="meta") for shape in ((4, 8), (8, 8), (16, 8))]
    graph = record(fn, operands, FakeTensorMode())
    # The first operators of the function: those of the weight.
    moved = [node for node in graph.graph.nodes if node.op == "call_function"][: 3 if transposed else 2]
    body, kept = taking(graph, moved[-1:], set(moved))
    assert kept == [0, 2]
    read = [node.meta["val"] for node in body.graph.nodes if node.op == "placeholder"]
    assert [value.is_contiguous() for value in read] == [True] * 3
    assert described(body) == described(recorded(body, read))
    x, g, pool = (torch.rand(like.shape) for like in operands)
    value = (g + 1).exp().t().contiguous() if transposed else (g + 1).exp()
    expected = fn(x, g, pool.clone())
    assert all(torch.allclose(a, b) for a, b in zip(body(x, pool.clone(), value), expected, strict=True))


def test_operands_have_dtypes_of_ge() -> None:
    assert is_operand(torch.empty(2, dtype=torch.bfloat16))
    assert not is_operand(torch.empty(2, dtype=torch.complex64))
    assert not is_operand((torch.empty(2),))
