"""Which operators of a graph of torch operators run on a second stream: what cores compute while the first exchanges rows of experts.

Collectives stay on the first stream: HCCL deadlocked where they were captured on another (Ascend/sglang pull requests 1196 and 1200).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from ....graphs.types import Mesh
from ...artifact import graph_io
from ...platform import Platform
from ..cost.estimate import Timed, timed_launches
from ..cost.parameters import parameters
from ..operators.table import COMMUNICATING_TARGETS
from ..overlap import CORES, EARLIER_TOKENS, LEAST_S, LINKS, NOTHING, in_order
from .file import AclFile, graph_of
from .flat import is_fixed, written_memory
from .second_stream import on_host


def with_second_stream(acl_file: AclFile, mesh: Mesh, platform: Platform) -> AclFile:
    """The file with what may run beside exchanges on a second stream; bodies that dispatch several times in the order of a schedule.

    Args:
        mesh: of all ranks.
        platform: that it is for; without a chip, or where it asks for one stream, nothing is changed.

    Raises:
        LoweringError: as `estimate`.
    """
    if not platform.chip or platform.serial:
        return acl_file
    graph = graph_io.decode(acl_file.graph)
    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    runs = list(_runs(acl_file, nodes))
    if not any(_named(run, "moe_dispatch") for run in runs):
        return acl_file
    memory, seconds = written_memory(graph), dict[Node, float]()
    if any(len(_named(run, "moe_dispatch")) > 1 for run in runs):
        seconds = _seconds(acl_file, nodes, timed_launches(acl_file, parameters(platform.chip), mesh, EARLIER_TOKENS, platform))
    second, ordered = set[Node](), nodes[: acl_file.operands]
    for run in runs:
        fixed = [node for node in run if is_fixed(node, memory)]
        exchanges = [*_named(run, "moe_dispatch"), *_named(run, "moe_combine")]
        if len(exchanges) > 2:
            run = _scheduled(run, fixed, exchanges, seconds)
            first, last = (pick(map(run.index, exchanges)) for pick in (min, max))
            second.update(set(run[first:last]) - set(fixed))
        elif exchanges:
            second.update(_beside(run, _named(run, "moe_dispatch"), _named(run, "moe_combine")) - set(fixed))
        ordered += run
    end = next(iter(graph.graph.find_nodes(op="output")))
    for node in ordered:
        end.prepend(node)
    return replace(acl_file, graph=graph_io.encode(graph), beside=_spans(ordered, second))


def _seconds(acl_file: AclFile, nodes: Sequence[Node], timed: Timed) -> dict[Node, float]:
    """How long each launch takes."""
    # Operators that are read by name alone give their nodes other names.
    number = {node.name: i for i, node in enumerate(graph_of(acl_file).graph.nodes)}
    launched = [nodes[number[node.name.rpartition("/")[2]]] for node in timed.started]
    return dict(zip(launched, timed.seconds, strict=True))


def _runs(acl_file: AclFile, nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes behind the operands, by body and segment."""
    places = zip(range(acl_file.operands, len(nodes)), acl_file.bodies, strict=True)
    grouped = itertools.groupby(places, key=lambda place: (place[1], sum(place[0] >= cut for cut in acl_file.cuts)))
    return [[nodes[number] for number, _ in run] for _, run in grouped]


def _named(run: Sequence[Node], collective: str) -> list[Node]:
    found = ((node, COMMUNICATING_TARGETS.get(str(node.target))) for node in run)
    return [node for node, record in found if record is not None and record.collective == collective]


def _beside(run: Sequence[Node], dispatches: Sequence[Node], combines: Sequence[Node]) -> set[Node]:
    """What a combine reads, and what neither waits for the dispatch nor is waited for by it."""
    behind = set[Node]()
    for node in run:
        if node in dispatches or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return _sources(run, combines) - _sources(run, dispatches) - behind


def _sources(run: Sequence[Node], nodes: Collection[Node]) -> set[Node]:
    sources = set(nodes)
    for node in reversed(run):
        if node in sources:
            sources.update(node.all_input_nodes)
    return sources.intersection(run)


def _scheduled(run: list[Node], fixed: Sequence[Node], exchanges: Collection[Node], seconds: Mapping[Node, float]) -> list[Node]:
    """The operators of a body by the time at which they start; those that must stay where they are keep their order."""
    number = {node: i for i, node in enumerate(run)}
    before: dict[Node, Any] = dict(zip(fixed[1:], fixed, strict=False))
    reads = [{number[source] for source in (*node.all_input_nodes, before.get(node)) if source in number} for node in run]
    lasts = [max(seconds[node], LEAST_S) if node in seconds else 0.0 for node in run]
    runs_on = [(LINKS if node in exchanges else CORES) if node in seconds else NOTHING for node in run]
    return [run[i] for i in in_order(reads, lasts, runs_on)]


def _spans(nodes: Sequence[Node], second: Collection[Node]) -> tuple[tuple[int, int], ...]:
    """First and behind the last of each run of nodes that are on the second stream; views between them count for neither."""
    spans = list[tuple[int, int]]()
    for number, node in enumerate(nodes):
        if node in second and not on_host(node):
            joins = spans and all(map(on_host, nodes[spans[-1][1] : number]))
            spans[-1:] = [(spans[-1][0], number + 1)] if joins else [*spans[-1:], (number, number + 1)]
    return tuple(spans)
