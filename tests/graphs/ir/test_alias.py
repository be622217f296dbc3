"""graphs/ir/alias.py: the owner of a view, an unpacking or an update in place is the node that allocated its memory."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph

from npucompile.graphs.ir.alias import is_view, owner, shares

aten = torch.ops.aten


VIEWS = [
    aten.view.default,
    aten._unsafe_view.default,
    aten.split.Tensor,
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
    aten.detach.default,
    torch.ops._c10d_functional.wait_tensor.default,
]


@pytest.mark.parametrize("target", VIEWS, ids=str)
def test_views(target: torch._ops.OpOverload) -> None:
    assert is_view(target)
    assert shares(target)


def test_updates_share_and_are_no_views() -> None:
    for target in (aten.copy_.default, aten.index_put_.default):
        assert shares(target)
        assert not is_view(target)


def test_everything_else_allocates() -> None:
    for target in (aten.clone.default, aten._to_copy.default, aten.add.Tensor, torch.ops.npuc.linear.default, operator.getitem, len):
        assert not shares(target)
        assert not is_view(target)


def test_owner_goes_through_all_of_them() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    halves = graph.call_function(aten.split.Tensor, (doubled, 2))
    half = graph.call_function(operator.getitem, (halves, 1))
    flat = graph.call_function(aten.view.default, (half, [-1]))
    top = graph.call_function(aten.topk.default, (flat, 1))
    value = graph.call_function(operator.getitem, (top, 0))
    assert [owner(n) for n in (x, doubled, halves, half, flat, top, value)] == [x, doubled, doubled, doubled, doubled, top, top]
