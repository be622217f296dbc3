"""Which parameters a lowered graph reads in a packed layout, made of them when they are loaded (lowering/cpp/panels.h).

The layout follows from the operators that read a parameter, also where it is handed to a body: it is packed where one of them is worth
it and all of them read that layout. Any other weights stay as they are, and operators that wanted them packed become plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from ....graphs.ir.alias import is_view
from ....graphs.ir.record import record
from ....graphs.native_ops import Packed, native_of
from .packing import KINDS, Layout


def choose(graph: GraphModule) -> None:
    """Decides the layout of all parameters of a lowered graph; operators whose weights are not packed become plain ones."""
    packed = {id(node) for node, _ in _packed(graph)}
    for module in _modules(graph):
        for node in list(module.graph.nodes):
            wants = _wants(node)
            if wants and not all(id(_source(node.args[i])) in packed for i in wants.operands):
                _inline(module.graph, node, wants.plain)
        module.recompile()


def layouts(graph: GraphModule) -> dict[int, Layout]:
    """The layouts of a graph that went through `choose`, by the position of the operand; operands that are not listed stay as they are."""
    position = {node: i for i, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder")}
    return {position[node]: layout for node, layout in _packed(graph) if node in position}


def _packed(graph: GraphModule) -> Iterator[tuple[Node, Layout]]:
    """The operands of the graph and of its bodies that are packed."""
    wanted = [(members, layout) for members in _shared(graph) if (layout := _agreed(members)) is not None]
    count = -1
    # An operator that reads two weights packed reads both plain if one of them stays so, which may leave others without a reader.
    while count != len(wanted):
        count, packed = len(wanted), {id(node) for members, _ in wanted for node in members}
        wanted = [(members, layout) for members, layout in wanted if all(_others_in(packed, reader) for reader in _all_readers(members))]
    for members, layout in wanted:
        yield from ((node, layout) for node in members)


def _agreed(members: list[Node]) -> Layout | None:
    """The layout in which all readers of one memory read it, if one of them is worth packing for."""
    found = {_layout(reader, node) for member in members for reader, node in _readers(member)}
    worth = any(wants.worth for reader in _all_readers(members) if (wants := _wants(reader)))
    return found.pop() if worth and len(found) == 1 else None


def _all_readers(members: list[Node]) -> list[Node]:
    return [reader for member in members for reader, _ in _readers(member)]


def _others_in(packed: set[int], reader: Node) -> bool:
    """Whether all weights that a reader wants packed are."""
    wants = _wants(reader)
    return wants is not None and all(id(_source(reader.args[i])) in packed for i in wants.operands)


def _modules(graph: GraphModule) -> list[GraphModule]:
    """The graph and its bodies, each once."""
    found = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    return [graph, *(getattr(graph, name) for name in sorted(found))]


def _shared(graph: GraphModule) -> list[list[Node]]:
    """Operands by the memory they are: each of the graph's with the operands of bodies that it is handed to.

    Operands of bodies that are handed a computed value in some call are left out, with all that share them.
    """
    group: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while group[node] is not node:
            node = group[node]
        return node

    for module in _modules(graph):
        group |= {node: node for node in module.graph.nodes if node.op == "placeholder"}
    computed = set[Node]()
    for call in (node for node in graph.graph.nodes if node.op == "call_module"):
        operands = [node for node in getattr(graph, str(call.target)).graph.nodes if node.op == "placeholder"]
        for given, operand in zip(call.args, operands, strict=True):
            if given in group:
                group[root(operand)] = root(given)
            else:
                computed.add(operand)
    members: dict[Node, list[Node]] = {}
    for node in group:
        members.setdefault(root(node), []).append(node)
    return [nodes for nodes in members.values() if not computed.intersection(nodes)]


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """The nodes that read an operand or a view of it, each with what it reads; calls of bodies are left out."""
    for user in node.users:
        if user.op == "call_module":
            continue
        if user.op == "call_function" and is_view(user.target):
            yield from _readers(user)
        else:
            yield user, node


def _layout(reader: Node, read: Node) -> Layout | None:
    """The layout in which an operator reads a weight; None where it reads it as it lies."""
    wants, source = _wants(reader), _source(read)
    assert isinstance(source, Node)
    places = [i for i, argument in enumerate(reader.args) if argument is read]
    if wants is None or len(places) != 1 or places[0] not in wants.operands:
        return None
    shape, stored = read.meta["val"].shape, source.meta["val"]
    if not read.meta["val"].is_contiguous() or stored.dtype != KINDS[wants.kind] or stored.numel() != read.meta["val"].numel():
        return None
    return Layout(wants.kind, math.prod(shape[:-2]), shape[-2], shape[-1])


def _source(value: object) -> object:
    """The node that a value is a view of."""
    while isinstance(value, Node) and value.op == "call_function" and is_view(value.target):
        value = value.args[0]
    return value


def _wants(node: Node) -> Packed | None:
    native = native_of(node.target)
    return native.packed if native else None


def _inline(graph: Graph, node: Node, operation: Callable[..., Any]) -> None:
    """Puts the nodes of an operation on the same operands in place of a node."""
    tensors = [argument for argument in node.args if isinstance(argument, Node)]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(values)
        return [operation(*(next(rest) if isinstance(argument, Node) else argument for argument in node.args))]

    like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (n.meta["val"] for n in tensors)]
    values = dict[Node, Node]()
    recorded = record(run, like, FakeTensorMode(), "cpu").graph
    for placeholder, tensor in zip((n for n in recorded.nodes if n.op == "placeholder"), tensors, strict=True):
        values[placeholder] = tensor
    with graph.inserting_before(node):
        for own in recorded.nodes:
            if own.op == "call_function":
                values[own] = graph.node_copy(own, values.__getitem__)
                values[own].meta = dict(own.meta)
            elif own.op == "output":
                (result,) = own.all_input_nodes
                node.replace_all_uses_with(values[result])
    graph.erase_node(node)
