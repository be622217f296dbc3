"""Turns a partitioned graph into calls of bodies of NPU operators, each kind of layer lowered once, its pools written in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _make_graph_module

from ...graphs import compile_count
from ...graphs.invariants import results_of
from ...graphs.ir.flatten import bodies
from ...graphs.ir.outline import outline
from ...graphs.ir.record import record
from ...graphs.primitive import of_target
from ...graphs.types import Signature
from ..lower import Lowered
from .donation import Placed, Pools, place

if TYPE_CHECKING:
    from ...graphs.spmd.partition import Partitioned

BACKEND = "ge"


def lower(partitioned: Partitioned) -> Lowered:
    """Lowers every body once; `npu` and `air` operators must be registered in this process.

    Raises:
        LoweringError: a pool cannot be written where it is (pools.py).
    """
    compile_count.record("trace")
    graph, signature = outline(partitioned.graph), partitioned.signature
    pools = place(graph, signature)
    lowered = {name: _lower_body(body, pools.bodies[name]) for name, body in bodies(graph).items()}
    return Lowered(partitioned.program.bucket, BACKEND, _calls(graph, signature, pools, lowered), signature)


class _Inliner(Interpreter):
    """Runs a body on meta tensors with the lowerings of primitives in their place."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        primitive = of_target(target)
        if primitive is not None:
            return primitive.lower_for(BACKEND)(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _lower_body(body: GraphModule, pools: Pools) -> GraphModule:
    """The body in operators of the device; new values of pools are written into their operands and are no results."""
    operands = [n.meta["val"] for n in body.graph.nodes if n.op == "placeholder"]
    written = set(pools.values())

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = _Inliner(body).run(*values)
        for operand, result in pools.items():
            # What was updated in place is the operand itself by now.
            if results[result] is not values[operand]:
                values[operand].copy_(results[result])
        return tuple(value for i, value in enumerate(results) if i not in written)

    graph = record(run, operands, FakeTensorMode())
    graph.recompile()
    return graph


def _calls(graph: GraphModule, signature: Signature, pools: Placed, lowered: Mapping[str, GraphModule]) -> GraphModule:
    """The graph that calls the lowered bodies and returns outputs only; what reads a pool's new value reads the pool."""
    made, values, root = Graph(), dict[Node, Node](), torch.nn.Module()
    for name, body in lowered.items():
        setattr(root, name, body)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if (home := pools.homes.get(node, node)) is not node:
            values[node] = values[home]
            continue
        values[node] = made.node_copy(node, values.__getitem__)
        values[node].meta = dict(node.meta)
        if node.target is operator.getitem:
            written = pools.bodies[str(node.args[0].target)].values()
            values[node].args = (values[node].args[0], node.args[1] - sum(i < node.args[1] for i in written))
        elif node.op == "call_module":
            written = pools.bodies[str(node.target)].values()
            values[node].meta["val"] = tuple(v for i, v in enumerate(node.meta["val"]) if i not in written)
    made.output(tuple(values[node] for node in results_of(graph)[: len(signature.outputs)]))
    return _make_graph_module(root, made)
