"""Computes equal values once, and values of constants alone when weights are loaded: a captured graph runs every operator that it has."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.node import map_aggregate

from ....graphs.invariants import results_of
from .flat import Flat, is_fixed, written_memory


def merge_equal(graph: GraphModule) -> None:
    """Replaces each plain computation that an earlier node makes as well by that node."""
    memory, known = written_memory(graph), dict[Hashable, Node]()
    for node in list(graph.graph.nodes):
        if node.op == "output" or is_fixed(node, memory):
            continue
        first = known.setdefault(_key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)


def drop_unread(graph: GraphModule) -> None:
    """Removes plain computations that nobody reads."""
    memory = written_memory(graph)
    for node in reversed(list(graph.graph.nodes)):
        if not node.users and node.op == "call_function" and (not is_fixed(node, memory) or _only_reads(node)):
            graph.graph.erase_node(node)


def _only_reads(node: Node) -> bool:
    """Whether a node that must stay where it is can be left out: it reads a pool, and writes and sends nothing."""
    return not (isinstance(node.target, torch._ops.OpOverload) and (node.target._schema.is_mutable or node.target.namespace != "aten"))


def _key(node: Node) -> Hashable:
    def plain(value: Any) -> Hashable:
        if isinstance(value, list | tuple):
            return ("list", *map(plain, value))
        # 1, 1.0 and True are equal and give other dtypes.
        return value if isinstance(value, Node) else (type(value), str(value) if isinstance(value, float) else value)

    return node.target, plain(node.args), tuple((key, plain(node.kwargs[key])) for key in sorted(node.kwargs))


def constants_of(graph: GraphModule) -> dict[Node, None]:
    """The nodes that are computed from constants alone, in order."""
    memory, constant = written_memory(graph), dict[Node, None]()
    for node in graph.graph.nodes:
        if node.op != "call_function" or is_fixed(node, memory) or not all(source in constant for source in node.all_input_nodes):
            continue
        # Others have no kernel on the CPU, which computes constants.
        if node.target is operator.getitem or node.target.namespace == "aten":
            constant[node] = None
    return constant


def fold_constants(flat: Flat) -> Flat:
    """The graph that takes values of constants alone as derived values, behind those of parameters."""
    graph, constant = flat.graph, constants_of(flat.graph)
    wanted = [node for node in constant if isinstance(node.meta["val"], torch.Tensor) and any(user not in constant for user in node.users)]
    if not wanted:
        return flat
    folding = _extended(flat.folding, constant, wanted)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for number, node in enumerate(wanted):
        with graph.graph.inserting_before(first):
            derived = graph.graph.placeholder(f"constant_{number}")
        derived.meta = {"val": _contiguous_like(node.meta["val"]), "leaf": f"constants.{len(placeholders) - flat.inputs + number}"}
        node.replace_all_uses_with(derived)
    for node in reversed(constant):
        graph.graph.erase_node(node)
    return Flat(graph, flat.inputs, folding, flat.params)


def evaluated(node: Node) -> torch.Tensor:
    """The value of a node that is computed from constants alone."""
    copies: dict[Node, Any] = {}

    def value(each: Node) -> Any:
        if each not in copies:
            copies[each] = each.target(*_on_cpu(each.args, value), **_on_cpu(each.kwargs, value))  # type: ignore[operator]
        return copies[each]

    computed: torch.Tensor = value(node)
    return computed


def _extended(folding: GraphModule | None, constant: dict[Node, None], wanted: list[Node]) -> GraphModule:
    graph, values, results = Graph(), dict[Node, Node](), list[Node]()
    for node in folding.graph.nodes if folding is not None else ():
        if node.op != "output":
            values[node] = graph.node_copy(node, values.__getitem__)
            values[node].meta = dict(node.meta)
    results += [values[node] for node in (results_of(folding) if folding is not None else ())]
    for node in constant:
        values[node] = graph.call_function(node.target, _on_cpu(node.args, values.__getitem__), _on_cpu(node.kwargs, values.__getitem__))  # type: ignore[arg-type]
        values[node].meta = {"val": node.meta["val"]}
    for node in wanted:
        results.append(_contiguous(graph, values[node]))
    graph.output(tuple(results))
    return _make_graph_module(torch.nn.Module(), graph)


def _contiguous(graph: Graph, node: Node) -> Node:
    # A view of a constant would share its memory with other values.
    copy = graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = _contiguous_like(node.meta["val"])
    return copy


def _contiguous_like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _on_cpu(arguments: Any, value: Any) -> Any:
    def each(argument: Any) -> Any:
        if isinstance(argument, Node):
            return value(argument)
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    return map_aggregate(arguments, each)
