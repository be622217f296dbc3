"""Two streams of a graph of torch operators: which launch waits for which, and when memory is free again on the stream that took it.

An allocator gives memory that the host let go to the next operator of the stream that took it, at once: who reads it on the other stream
must have ended by then. Nothing else orders streams, so both follow from which launches are beside.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ....graphs.errors import LoweringError
from ....graphs.ir.alias import is_view
from ...artifact import graph_io
from .file import AclFile
from .flat import is_fixed, written_memory

STREAM = "beside"
"""What inspections and estimates call the second stream."""
FETCH = "npu.npu_prefetch.default"
"""Operator that is always there: on the first stream the next would wait for it."""


def on_host(node: Node) -> bool:
    """Whether an operator launches nothing: a view, or an unpacking. (A wait for a collective makes its stream wait.)"""
    name = str(node.target)
    if name.startswith(("operator.getitem", "<built-in function getitem")):
        return True
    return name.startswith("aten.") and is_view(graph_io.find_target(name))


def beside(acl_file: AclFile, nodes: Sequence[Node]) -> frozenset[Node]:
    """The nodes of the second stream."""
    return frozenset(node for first, stop in acl_file.beside for node in nodes[first:stop])


@dataclass(frozen=True)
class Order:
    """How the launches of one segment are ordered between streams.

    Attributes:
        waits: launch -> the launch of the other stream that it waits for; by it, for all before that one.
        frees: launch -> values that the host lets go behind it.
    """

    waits: Mapping[Node, Node]
    frees: Mapping[Node, tuple[Node, ...]]


def order(part: Sequence[Node], second: Collection[Node], inside: Mapping[Node, Node]) -> Order:
    """Orders a segment, at whose begin the second stream has waited for the first, and at whose end the first waits for the second.

    Args:
        part: its nodes.
        second: the nodes of the second stream.
        inside: those of its values that nobody reads behind it -> the last node that reads them.
    """
    number, made_by = {node: i for i, node in enumerate(part)}, dict[Node, Node]()
    waits, seen, known = dict[Node, Node](), [-1, -1], ([], [])  # type: ignore[var-annotated]
    for i, node in enumerate(part):
        sources = [made_by[source] for source in node.all_input_nodes if source in made_by]
        if on_host(node):
            made_by.update({node: sources[0]} if sources else {})
            continue
        made_by[node], mine = node, node in second
        latest = max((number[source] for source in sources if (source in second) != mine), default=-1)
        if latest > seen[mine]:
            waits[node], seen[mine] = part[latest], latest
        known[mine].append((i, seen[mine]))
    frees: dict[Node, list[Node]] = {}
    for value, reader in inside.items():
        stream = made_by.get(value, value) in second
        others = [number[user] for user in value.users if user in number and (user in second) != stream and not on_host(user)]
        at = _behind(known[stream], max(number[reader], number[value]), max(others, default=-1))
        frees.setdefault(part[-1 if at is None else at], []).append(value)
    return Order(waits, {node: tuple(values) for node, values in frees.items()})


def _behind(launches: Sequence[tuple[int, int]], position: int, other: int) -> int | None:
    """The first launch at or behind a position whose stream has seen a launch of the other; None where there is none.

    Args:
        launches: of the stream: position, and the last of the other stream that it has seen; both increase.
    """
    first = max(bisect.bisect_left(launches, (position, -1)), bisect.bisect_left(launches, other, key=lambda launch: launch[1]))
    return launches[first][0] if first < len(launches) else None


def check(acl_file: AclFile) -> None:
    """Proves that whatever order two streams take, a step computes the same.

    Raises:
        LoweringError: naming what is beside and must not be: what communicates (each rank runs collectives in one order, on one stream),
            reads or writes memory that is written in place, or takes lists of the host.
    """
    if not acl_file.beside:
        return
    graph = graph_io.decode(acl_file.graph)
    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    second, memory = beside(acl_file, nodes), written_memory(graph)
    for node in nodes:
        if node in second and not on_host(node) and is_fixed(node, memory):
            raise LoweringError(
                f"{node.name} ({node.target}) is on the second stream; legal there is what neither communicates, nor takes lists of the"
                " host, nor reads or writes memory that is written in place"
            )
