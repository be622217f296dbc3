"""A graph lowered to calls of bodies, as one flat graph whose derived values are operands."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module

from ....graphs import ordering as ordering
from ....graphs.errors import LoweringError
from ....graphs.invariants import results_of
from ....graphs.ir.alias import owner
from ....graphs.types import Signature
from ..fold import FOLDED
from ..operators.table import GROUP_ARGUMENTS, HOST_LISTS

_PLAIN = ("aten", "npu")
_AFTER = torch.ops.npuc_order.after.default
BODY = "body"
"""Key in a node's `meta` for the name of the call that it belongs to."""


@dataclass(frozen=True)
class Flat:
    """A flat graph.

    Attributes:
        graph: operands of the program, derived values -> outputs.
        inputs: number of operands of the program.
        folding: parameters -> derived values; None where there are none.
        params: operand of each placeholder of `folding`.
    """

    graph: GraphModule
    inputs: int
    folding: GraphModule | None
    params: tuple[int, ...]


def flat(graph: GraphModule, signature: Signature) -> Flat:
    """Inlines every body but the one of derived values, whose results become placeholders.

    Args:
        graph: `Lowered.graph` of lowered.py.

    Raises:
        LoweringError: the main graph has something else than operands, calls and unpackings, or another number of operands or results
            than the signature.
    """
    operands = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if len(operands) != len(signature.operands) or len(results_of(graph)) != len(signature.outputs):
        has = f"{len(operands)} operands and {len(results_of(graph))} results"
        raise LoweringError(f"the graph has {has}, its signature {len(signature.operands)} and {len(signature.outputs)}")
    new, values = Graph(), dict[Node, Node]()
    results: dict[Node, tuple[Node, ...]] = {}
    folding, params = None, tuple[int, ...]()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = _copied(new.placeholder(node.name), node)
        elif node.op == "call_module" and node.target == FOLDED:
            folding, params = graph.get_submodule(FOLDED), tuple(operands.index(param) for param in node.args)
            for derived in sorted(node.users, key=lambda user: int(user.args[1])):
                values[derived] = _copied(new.placeholder(f"derived_{derived.args[1]}"), derived)
        elif node.op == "call_module":
            module: Any = graph.get_submodule(str(node.target))
            results[node] = _inlined(new, module, [values[arg] for arg in node.args], node.name)
        elif node.target is operator.getitem and node.args[0] in results:
            values[node] = results[node.args[0]][node.args[1]]
        elif node.op == "output":
            new.output(tuple(values[result] for result in node.args[0]))
        elif node not in values:
            raise LoweringError(f"the main graph has {node.op} {node.name} ({node.target}); legal are calls of bodies and getitem")
    return Flat(_make_graph_module(torch.nn.Module(), new), len(operands), folding if isinstance(folding, GraphModule) else None, params)


def _inlined(graph: Graph, module: GraphModule, arguments: list[Node], call: str) -> tuple[Node, ...]:
    values: dict[Node, Node] = {}
    operands = iter(arguments)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(operands)
        elif node.op == "output":
            return tuple(values[result] for result in node.args[0])
        elif node.target is _AFTER:
            # One stream runs what communicates in the order of the nodes.
            values[node] = values[node.args[0]]
        else:
            values[node] = _copied(graph.node_copy(node, values.__getitem__), node)
            values[node].meta[BODY] = call
    raise AssertionError("a graph has an output")


def _copied(copy: Node, node: Node) -> Node:
    copy.meta = {key: node.meta[key] for key in ("val", "leaf") if key in node.meta}
    return copy


def written_memory(graph: GraphModule) -> frozenset[Node]:
    """The nodes that allocated what some node writes: operands, and values that are filled in place."""
    return frozenset(owner(source) for node in graph.graph.nodes for source in writes(node))


def writes(node: Node) -> tuple[Node, ...]:
    """The arguments that a node writes, by its operator's schema."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return ()
    written = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            written += [value] if isinstance(value, Node) else []
    return tuple(written)


def is_fixed(node: Node, memory: frozenset[Node]) -> bool:
    """Whether a node must stay where it is: it reads or writes memory that changes, or is no plain computation.

    Args:
        memory: `written_memory` of the graph.
    """
    if node.op != "call_function":
        return True
    if owner(node) in memory or any(owner(source) in memory for source in node.all_input_nodes):
        return True
    target = node.target
    if target is operator.getitem:
        return is_fixed(node.args[0], memory)  # type: ignore[arg-type]
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _PLAIN or target._schema.is_mutable:
        return True
    if str(target) in GROUP_ARGUMENTS or str(target) in HOST_LISTS:
        return True
    return torch.Tag.nondeterministic_seeded in target.tags or target._opname.startswith(("empty", "new_empty"))
