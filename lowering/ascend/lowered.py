"""Turns a partitioned graph into calls of bodies of NPU operators: each kind of layer is lowered once and writes its pools in place."""

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
from ..platform import CPU, Platform
from . import packages
from .donation import Donated, Donations, donations
from .hoist import hoist
from .share import share

if TYPE_CHECKING:
    from ...graphs.spmd.partition import Partitioned

KIND = "npu"
"""Kind of lowering that bodies are made of."""


def lower(partitioned: Partitioned, platform: Platform = CPU, backend: str = "ge") -> Lowered:
    """Lowers every body once; `npu` and `air` operators must be registered in this process.

    Args:
        platform: decides which variant of a primitive's lowering is taken.
        backend: name of the backend that runs the graph.

    Raises:
        LoweringError: a state pool cannot be updated in place (donation.py).
    """
    compile_count.record("trace")
    packages.declare()
    graph, signature = outline(partitioned.graph), partitioned.signature
    donated = donations(graph, signature)
    features = platform.features(backend)
    lowered = {name: _lower_body(body, donated.bodies[name], features) for name, body in bodies(graph).items()}
    calls = _calls(graph, signature, donated, lowered)
    runs = bodies(graph).keys() - bodies(partitioned.graph).keys()
    calls = hoist(share(calls, signature, runs), signature)
    return Lowered(partitioned.program.bucket, backend, calls, signature, platform)


class _NpuInliner(Interpreter):
    """Runs a body on meta tensors with primitives replaced by their lowerings for a platform's features."""

    def __init__(self, body: GraphModule, features: frozenset[str]) -> None:
        super().__init__(body)
        self._features = features

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        primitive = of_target(target)
        if primitive is not None:
            return primitive.lower_for(KIND, self._features)(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _lower_body(body: GraphModule, donated: Donated, features: frozenset[str]) -> GraphModule:
    """The body in operators of the device; new values of pools are written into their operands and are no results."""
    operands = [n.meta["val"] for n in body.graph.nodes if n.op == "placeholder"]
    new_values = set(donated.values())

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = _NpuInliner(body, features).run(*values)
        for operand, result in donated.items():
            # An operator that updated the operand in place has returned the operand itself.
            if results[result] is not values[operand]:
                values[operand].copy_(results[result])
        return tuple(value for i, value in enumerate(results) if i not in new_values)

    graph = record(run, operands, FakeTensorMode())
    graph.recompile()
    return graph


def _calls(graph: GraphModule, signature: Signature, donated: Donations, lowered: Mapping[str, GraphModule]) -> GraphModule:
    """The graph that calls the lowered bodies and returns outputs only; readers of a pool's new value read the pool."""
    calls, values, root = Graph(), dict[Node, Node](), torch.nn.Module()
    for name, body in lowered.items():
        setattr(root, name, body)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if (pool := donated.pools.get(node, node)) is not node:
            values[node] = values[pool]
            continue
        values[node] = calls.node_copy(node, values.__getitem__)
        values[node].meta = dict(node.meta)
        if node.target is operator.getitem:
            new_values = donated.bodies[str(node.args[0].target)].values()
            values[node].args = (values[node].args[0], node.args[1] - sum(i < node.args[1] for i in new_values))
        elif node.op == "call_module":
            new_values = donated.bodies[str(node.target)].values()
            values[node].meta["val"] = tuple(v for i, v in enumerate(node.meta["val"]) if i not in new_values)
    calls.output(tuple(values[node] for node in results_of(graph)[: len(signature.outputs)]))
    return _make_graph_module(root, calls)
