"""lowering/calls.py: calls of lowered bodies return outputs only, and a pool's new value is the pool itself."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule

from npucompile.graphs.types import Aval, Leaf, Signature
from npucompile.lowering.calls import calls_of
from npucompile.lowering.donation import Donations

ROW = torch.empty(2)
LEAF = Aval((2,), torch.float32)
SIGNATURE = Signature(
    params=(),
    state=(Leaf("state.pool", LEAF),),
    inputs=(Leaf("inputs.x", LEAF),),
    outputs=(Leaf("outputs.y", LEAF), Leaf("outputs.z", LEAF)),
)


class Functional(torch.nn.Module):
    """Of a pool and a row: the sum of both, the pool's new value, their difference."""

    def forward(self, pool: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pool + row, pool * 2, pool - row


class InPlace(torch.nn.Module):
    def forward(self, pool: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = pool + row, pool - row
        pool.mul_(2)
        return results


def called_twice() -> tuple[GraphModule, Donations]:
    """The second call reads the pool that the first replaced, and the first's third result."""
    graph, root = Graph(), torch.nn.Module()
    root.body = Functional()
    pool, x = graph.placeholder("pool"), graph.placeholder("x")
    first = graph.call_module("body", (pool, x))
    new, third = (graph.call_function(operator.getitem, (first, i)) for i in (1, 2))
    second = graph.call_module("body", (new, third))
    y, newest, z = (graph.call_function(operator.getitem, (second, i)) for i in range(3))
    graph.output((y, z, newest))
    for call in (first, second):
        call.meta["val"] = (ROW, ROW, ROW)
    return GraphModule(root, graph), Donations({"body": {0: 1}}, {pool: pool, new: pool, newest: pool})


def test_bodies_that_write_in_place_compute_what_functional_ones_do() -> None:
    functional, donations = called_twice()
    pool, x = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -3.0])
    y, z, newest = functional(pool, x)
    calls = calls_of(functional, SIGNATURE, donations, {"body": InPlace()})  # type: ignore[dict-item]
    got = calls(pool, x)
    assert len(got) == len(SIGNATURE.outputs)
    assert all(map(torch.equal, (*got, pool), (y, z, newest)))
    assert [len(node.meta["val"]) for node in calls.graph.nodes if node.op == "call_module"] == [2, 2]
