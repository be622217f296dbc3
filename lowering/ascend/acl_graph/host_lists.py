"""Integers that the host must know before it launches an operator: where the graph computes them, and where it is cut to read them.

The tiling of fused attention is computed by the host from lists of lengths. GE has a form of the operator that takes tensors (torchair's
`air` namespace, "only support in max-autotune mode"); torch_npu's takes SymInt[]. The graph computes the lengths, so they are read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module

from ....graphs.errors import LoweringError
from ...artifact.graph_io import find_target
from ..operators.table import HOST_LISTS
from .flat import is_fixed, written_memory
from .once import constants_of, evaluated

_OF_GE = "air."
"""Namespace of forms that GE alone has."""


def take_lists(graph: GraphModule) -> None:
    """Replaces the forms of operators that GE alone has by those that take lists; lists of constants become integers.

    Raises:
        LoweringError: an operator outside torch_npu has no such form.
    """
    constant = constants_of(graph)
    for node in list(graph.graph.nodes):
        name, form = str(node.target), str(node.target).replace(_OF_GE, "npu.", 1)
        if node.op == "call_function" and name.startswith(_OF_GE):
            if form not in HOST_LISTS:
                raise LoweringError(f"{node.name} calls {name}, which GE alone has; others are known of {', '.join(sorted(HOST_LISTS))}")
            node.target = find_target(form)
        for argument in HOST_LISTS.get(str(node.target), ()):
            value = node.kwargs.get(argument)
            if isinstance(value, Node) and value in constant:
                node.update_kwarg(argument, evaluated(value).tolist())
    graph.recompile()


def lists_of(node: Node) -> Mapping[str, Node]:
    """The tensors that an operator takes as lists, by argument."""
    return {name: value for name in HOST_LISTS.get(str(node.target), ()) if isinstance(value := node.kwargs.get(name), Node)}


def with_cuts(graph: GraphModule) -> tuple[GraphModule, tuple[int, ...]]:
    """The graph with lists computed as early as their inputs allow, and the numbers of the nodes before which the host reads them.

    Lists that can be read at once share a cut, since each costs a copy to the host and its answer.
    """
    nodes = list(graph.graph.nodes)
    wanted = dict.fromkeys(value for node in nodes for value in lists_of(node).values())
    if not wanted:
        return graph, ()
    movable = _movable_sources(wanted, written_memory(graph))
    ordered = list(_early(nodes, movable))
    return _reordered(ordered), tuple(_cuts(ordered, movable))


def _movable_sources(wanted: Mapping[Node, None], memory: frozenset[Node]) -> set[Node]:
    movable, queue = set[Node](), list(wanted)
    while queue:
        node = queue.pop()
        if node not in movable and not is_fixed(node, memory):
            movable.add(node)
            queue += node.all_input_nodes
    return movable


def _early(nodes: list[Node], movable: set[Node]) -> Iterator[Node]:
    """The nodes with each of `movable` behind its last input."""
    placed = set[Node]()

    def place(node: Node) -> Iterator[Node]:
        placed.add(node)
        yield node
        for user in node.users:
            if user in movable and user not in placed and all(source in placed for source in user.all_input_nodes):
                yield from place(user)

    first = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
    placed.update(nodes[:first])
    yield from nodes[:first]
    for node in nodes[first:]:
        ready = node not in placed and node in movable and all(source.op == "placeholder" for source in node.all_input_nodes)
        if ready:
            yield from place(node)
    for node in nodes[first:]:
        if node not in placed:
            yield from place(node)


def _cuts(ordered: list[Node], movable: set[Node]) -> Iterator[int]:
    position = {node: i for i, node in enumerate(ordered)}
    cut = 0
    for node in ordered:
        late = [position[value] for value in lists_of(node).values() if position[value] >= cut]
        if late:
            cut = max(late) + 1
            while ordered[cut] in movable or ordered[cut].op == "placeholder":
                cut += 1
            yield cut


def _reordered(ordered: list[Node]) -> GraphModule:
    graph, values = Graph(), dict[Node, Node]()
    for node in ordered:
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node].meta = dict(node.meta)
    graph.lint()
    return _make_graph_module(torch.nn.Module(), graph)
