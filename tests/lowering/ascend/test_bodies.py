"""lowering/ascend/bodies.py: which nodes may be computed elsewhere, and the body that takes their values."""

from __future__ import annotations

import pytest
import torch
from support import ge_bodies as gb
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.lowering.ascend.bodies import is_operand, is_plain, taking

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


def test_operands_have_dtypes_of_ge() -> None:
    assert is_operand(torch.empty(2, dtype=torch.bfloat16))
    assert not is_operand(torch.empty(2, dtype=torch.complex64))
    assert not is_operand((torch.empty(2),))
