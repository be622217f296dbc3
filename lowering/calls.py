"""The graph that calls lowered bodies: it passes values from one to the next and names each pool by its operand."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module

from ..graphs.invariants import results_of
from ..graphs.types import Signature
from .donation import Donations


def calls_of(graph: GraphModule, signature: Signature, donated: Donations, lowered: Mapping[str, GraphModule]) -> GraphModule:
    """The graph that calls the lowered bodies and returns outputs only; readers of a pool's new value read the pool.

    Args:
        graph: operands, calls, unpackings and an output (graphs/ir/outline.py), functional.
        donated: the pools of `graph` that its bodies update in place.
        lowered: a body for each body of `graph`, without the results that are new values of pools.
    """
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
