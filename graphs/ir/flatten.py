"""Bodies of a graph, and the flat graph with every call replaced by its body."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module


def bodies(graph: GraphModule) -> dict[str, GraphModule]:
    """The bodies that a graph calls, by name, in the order of their first calls."""
    names = dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "call_module")
    return {name: graph.get_submodule(name) for name in names}  # type: ignore[misc]


def flatten(graph: GraphModule) -> GraphModule:
    """A new graph in which every call is replaced by a copy of its body's nodes."""
    return inlined(graph, bodies(graph))


def inlined(graph: GraphModule, names: Collection[str]) -> GraphModule:
    """A new graph in which calls of some bodies are replaced by a copy of their nodes; those of others stay."""
    flat, root, values = Graph(), torch.nn.Module(), dict[Node, Node]()
    unpacked: dict[Node, tuple[Node, ...]] = {}
    for name, body in bodies(graph).items():
        if name not in names:
            setattr(root, name, body)
    for node in graph.graph.nodes:
        if node.op == "call_module" and node.target in names:
            unpacked[node] = _inline(flat, graph.get_submodule(str(node.target)), [values[a] for a in node.args])  # type: ignore[arg-type]
        elif node.target is operator.getitem and node.args[0] in unpacked:
            values[node] = unpacked[node.args[0]][node.args[1]]
        elif node.op == "output":
            flat.output(torch.fx.node.map_arg(node.args[0], values.__getitem__))
        else:
            values[node] = _copy(flat, node, values)
    return _make_graph_module(root, flat)


def _inline(flat: Graph, body: GraphModule, arguments: list[Node]) -> tuple[Node, ...]:
    values: dict[Node, Node] = {}
    operands = iter(arguments)
    for node in flatten(body).graph.nodes if bodies(body) else body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(operands)
        elif node.op == "output":
            return tuple(values[result] for result in node.args[0])
        else:
            values[node] = _copy(flat, node, values)
    raise AssertionError("a graph has an output")


def _copy(flat: Graph, node: Node, values: dict[Node, Node]) -> Node:
    copy = flat.node_copy(node, values.__getitem__)
    copy.meta = dict(node.meta)
    return copy
