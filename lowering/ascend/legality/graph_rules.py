"""Rules of whole graphs, which public reports of devices taught; `threads.json` has the reports."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..operators.node import Node
from ..operators.record import COUNTS, SUMS, TokenList
from ..operators.table import COMMUNICATING, record_of

_KINDS = {SUMS: "running sums", COUNTS: "counts"}


class GraphRule(Protocol):
    """A rule of the operators of a graph, in order."""

    __name__: str

    def __call__(self, nodes: Sequence[Node], /) -> Iterator[tuple[Node, str]]:
        """Operators that break it, each with what was given and what is legal."""


def group_list_kind(nodes: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """A list of tokens of each expert is read as its producer writes it; casts, copies and views between them change nothing."""
    producers = {node.name: node for node in nodes}
    for node in nodes:
        record = record_of(node)
        if record is None or record.takes_tokens is None or not (tensor := node.find(str(record.takes_tokens.operand))):
            continue
        if (source := _list_source(tensor, producers)) is None:
            continue
        wanted, listed = _kind(node, record.takes_tokens), _kind(*source)
        if wanted != listed:
            slot, writer = record.takes_tokens.operand, source[0].called or source[0].type
            yield node, f"{slot} is read as {wanted} and {writer} writes {listed}; legal is the same on both sides"


def ordered_exchange(nodes: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """Data orders every collective, and every kernel that starts on all cores at once, against every dispatch and combine.

    Two of them at once wait for each other: collectives where they run on vector cores (AIV mode), the others where an exchange holds cores
    while it waits for a rank whose own exchange stands behind such a kernel.
    """
    communicating = [(node, record) for node in nodes if (record := COMMUNICATING.get(node.type)) is not None]
    exchanges = [node.name for node, record in communicating if record.own_group]
    communicating += [(node, record) for node in nodes if (record := record_of(node)) is not None and record.all_cores]
    if not exchanges:
        return
    ordered = _ordered(tuple((node.name, node.producers) for node in nodes), tuple(exchanges))
    for node, record in communicating:
        if not record.own_group and (unordered := ~ordered[node.name] & ((1 << len(exchanges)) - 1)):
            first = exchanges[(unordered & -unordered).bit_length() - 1]
            others = unordered.bit_count() - 1
            yield node, f"no data orders it against {first} and {others} more; legal is a collective before or after each"


def few_streams(nodes: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """A graph has no more streams than published launches let a device have (STREAMS_PER_DEVICE)."""
    labels = dict[str, Node]()
    for node in nodes:
        if node.stream:
            labels.setdefault(node.stream, node)
    for number, node in enumerate(labels.values(), start=2):
        if number > STREAMS:
            yield node, f"is on stream {number} of the graph; legal are {STREAMS} (STREAMS_PER_DEVICE), the first one included"


STREAMS = 32
ORDERED_RULES: tuple[GraphRule, ...] = (group_list_kind, few_streams)
"""Rules of a graph whose operators run as they are listed, so that nothing has to order exchanges."""
GRAPH_RULES: tuple[GraphRule, ...] = (*ORDERED_RULES, ordered_exchange)


@functools.lru_cache(maxsize=2)
def _ordered(edges: tuple[tuple[str, tuple[str, ...]], ...], marked: tuple[str, ...]) -> Mapping[str, int]:
    """Of each operator, given with those that it waits for, the marked ones before or behind it, each as the bit of its place."""
    bits, before = {name: 1 << place for place, name in enumerate(marked)}, dict[str, int]()
    for name, producers in edges:
        reached = bits.get(name, 0)
        for producer in producers:
            reached |= before[producer]
        before[name] = reached
    after = {name: bits.get(name, 0) for name, _ in edges}
    for name, producers in reversed(edges):
        if reached := after[name]:
            for producer in producers:
                after[producer] |= reached
    return {name: before[name] | after[name] for name, _ in edges}


def _list_source(tensor: str, producers: Mapping[str, Node]) -> tuple[Node, TokenList] | None:
    """The operator that lists tokens of each expert, and how; None where it is another one's."""
    while (node := producers.get(tensor.rpartition(":")[0])) is not None:
        record = record_of(node)
        if node.reads and (node.type == "" or (record is not None and (record.view or record.copies == 1))):
            tensor = node.reads[0]
            continue
        listed = record.gives_tokens if record is not None else None
        return (node, listed) if listed is not None and tensor == f"{node.name}:{listed.operand}" else None
    return None


def _kind(node: Node, tokens: TokenList) -> str:
    number: Any = node.attributes.get(tokens.attribute, tokens.default)
    return _KINDS.get(number, f"kind {number}")
