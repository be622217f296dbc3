"""Turns a partitioned graph into calls of bodies of NPU operators, each kind of layer lowered once, its pools written in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from ...graphs import events
from ...graphs.errors import LoweringError
from ...graphs.flatten import bodies
from ...graphs.outline import outline
from ...graphs.primitive import of_target
from ...graphs.types import Signature
from ...graphs.verify import results_of
from ..lower import Lowered
from .fuse import fuse

if TYPE_CHECKING:
    from ...graphs.partition import Partitioned

BACKEND = "ge"
Pools = dict[int, int]
"""Operand of a body that is a state pool -> the body's result that is its new value."""


def lower(partitioned: Partitioned) -> Lowered:
    """Lowers every body once; `npu` and `air` operators must be registered in this process.

    Raises:
        LoweringError: a pool is read by two calls, or by calls of one body in different places.
    """
    events.record("trace")
    graph, signature = outline(partitioned.graph), partitioned.signature
    pools = _pools(graph, signature)
    lowered = {name: _lower_body(body, pools[name]) for name, body in bodies(graph).items()}
    return Lowered(partitioned.program.bucket, BACKEND, _calls(graph, signature, pools, lowered), signature)


def _pools(graph: GraphModule, signature: Signature) -> Mapping[str, Pools]:
    """Where each body has pools among its operands and results: the same in all calls of it."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"][len(signature.params) :][: len(signature.state)]
    stored = results_of(graph)[len(signature.outputs) :]
    found: dict[Node, Pools] = {node: {} for node in graph.graph.nodes if node.op == "call_module"}
    for pool, new, leaf in zip(placeholders, stored, signature.state, strict=True):
        if new is pool:
            continue
        readers = [user for user in pool.users if user.op == "call_module"]
        call = new.args[0]
        if len(readers) != 1 or readers[0] is not call or list(call.args).count(pool) != 1:
            raise LoweringError(
                f"{leaf.name} is read by {', '.join(map(str, readers))} and made anew by {call}; legal is one call, which does both: a "
                "device updates a pool in place, and nothing says when another reader would see which value"
            )
        found[call][list(call.args).index(pool)] = int(str(new.args[1]))
    by_body: dict[str, Pools] = {}
    for call, pools in found.items():
        if by_body.setdefault(str(call.target), pools) != pools:
            raise LoweringError(
                f"body {call.target} is called with pools at operands {pools} and at {by_body[str(call.target)]}; legal is one place"
            )
    return by_body


class _Inliner(Interpreter):
    """Runs a body on meta tensors with the lowerings of primitives in their place."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        primitive = of_target(target)
        if primitive is not None:
            return primitive.lower_for(BACKEND)(*args, **kwargs)
        if isinstance(kwargs.get("device"), torch.device):
            kwargs = {**kwargs, "device": torch.device("meta")}
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

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in operands]
        graph = make_fx(run, tracing_mode="real")(*fakes)
    graph.graph.eliminate_dead_code()
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    output.args = (tuple(output.args[0]),)
    fuse(graph)
    graph.recompile()
    return graph


def _calls(graph: GraphModule, signature: Signature, pools: Mapping[str, Pools], lowered: Mapping[str, GraphModule]) -> GraphModule:
    """The graph that calls the lowered bodies and returns outputs only."""
    made, values, root = Graph(), dict[Node, Node](), torch.nn.Module()
    for name, body in lowered.items():
        setattr(root, name, body)
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        index = None
        if node.target is operator.getitem:
            written = set(pools[str(node.args[0].target)].values())
            if node.args[1] in written:
                continue
            index = node.args[1] - sum(i < node.args[1] for i in written)
        values[node] = made.node_copy(node, values.__getitem__)
        values[node].meta = dict(node.meta)
        if index is not None:
            values[node].args = (values[node].args[0], index)
        if node.op == "call_module":
            written = set(pools[str(node.target)].values())
            values[node].meta["val"] = tuple(v for i, v in enumerate(node.meta["val"]) if i not in written)
    made.output(tuple(values[node] for node in results_of(graph)[: len(signature.outputs)]))
    return _make_graph_module(root, made)
