"""The order of a graph's operators by list scheduling: what the longest path waits for comes first, so that links are never idle for long.

Streams run operators in the order of the graph, and the order in which a model calls them is one of many. Here it is that of start times
in a schedule by the cost model, in which kernels share the cores and exchanges the links. Nothing is added or taken away: data and the
order of collectives, which the model states, stay as they are.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...graphs.types import Mesh
from ..platform import Platform
from .cost.estimate import timed_launches
from .cost.parameters import parameters
from .ge_file import STREAM, GeFile, parse
from .launches import body_of
from .streams import DISPATCHES, EXCHANGE

NOTHING, LINKS, CORES = range(3)
"""What an operator occupies; of those that start at once, the order in which they are listed."""
LEAST_S = 1e-9
"""That an operator takes at least, so that it is listed behind what it reads, whose start is earlier."""
EARLIER_TOKENS = 0
"""Cached tokens of each request that prices assume: what runs beside an exchange does not depend on them."""


def in_order_of_time(ge_file: GeFile, mesh: Mesh, platform: Platform) -> GeFile:
    """The graph with the operators of each body that dispatches several times in the order of a schedule.

    Args:
        mesh: of all ranks.
        platform: that it is for; without a chip, or where it asks for one stream, nothing is changed.

    Raises:
        LoweringError: as `estimate`.
    """
    if not platform.chip or platform.serial:
        return ge_file
    model = parse(ge_file.graph)
    bodies = [list(ops) for _, ops in itertools.groupby(model.graph[0].op, lambda op: body_of(op.name))]
    if not any(_dispatches(ops) > 1 for ops in bodies):
        return ge_file
    timed = timed_launches(ge_file, parameters(platform.chip), mesh, EARLIER_TOKENS, platform)
    seconds = dict(zip((node.name for node in timed.started), timed.seconds, strict=True))
    ordered = [op for ops in bodies for op in (_scheduled(ops, seconds) if _dispatches(ops) > 1 else ops)]
    # The messages are parts of the list that is emptied.
    copies = [_copy(op) for op in ordered]
    del model.graph[0].op[:]
    model.graph[0].op.extend(copies)
    return replace(ge_file, graph=model.SerializeToString(deterministic=True))


def _copy(op: Any) -> Any:
    copy = type(op)()
    copy.CopyFrom(op)
    return copy


def _dispatches(ops: Sequence[Any]) -> int:
    return sum(op.type in DISPATCHES for op in ops)


def _exchanges(op: Any) -> bool:
    return STREAM in op.attr and op.attr[STREAM].s == EXCHANGE.encode()


def _scheduled(ops: Sequence[Any], seconds: Mapping[str, float]) -> list[Any]:
    """The operators of a body, each after those that it reads, by the time at which they start."""
    number = {op.name: i for i, op in enumerate(ops)}
    reads = [{number[name] for tensor in op.input if (name := tensor.rpartition(":")[0]) in number} for op in ops]
    lasts = [max(seconds[op.name], LEAST_S) if op.name in seconds else 0.0 for op in ops]
    runs_on = [(LINKS if _exchanges(op) else CORES) if op.name in seconds else NOTHING for op in ops]
    return [ops[i] for i in in_order(reads, lasts, runs_on)]


def in_order(reads: Sequence[Collection[int]], lasts: Sequence[float], runs_on: Sequence[int]) -> list[int]:
    """The tasks of `start_times` in an order that streams can run, each behind what it reads."""
    starts = start_times(reads, lasts, runs_on)
    return sorted(range(len(reads)), key=lambda i: (starts[i], runs_on[i], i))


def start_times(reads: Sequence[Collection[int]], lasts: Sequence[float], runs_on: Sequence[int]) -> list[float]:
    """When each task starts, by list scheduling: of those that are ready, the one first that the longest path begins with.

    Args:
        reads: for each task the earlier ones that it waits for.
        lasts: seconds of each.
        runs_on: what each occupies; tasks of one kind run one after the other, those that occupy nothing at once.
    """
    readers: list[list[int]] = [[] for _ in reads]
    for i, sources in enumerate(reads):
        for source in sources:
            readers[source].append(i)
    path = list(lasts)
    for i in reversed(range(len(reads))):
        path[i] += max((path[reader] for reader in readers[i]), default=0.0)
    missing, starts, free = [len(sources) for sources in reads], [0.0] * len(reads), [0.0, 0.0, 0.0]
    ready: list[list[tuple[float, int]]] = [[], [], []]
    for i, count in enumerate(missing):
        if not count:
            heapq.heappush(ready[runs_on[i]], (-path[i], i))
    now, ends = 0.0, list[tuple[float, int]]()
    while True:
        # What takes no time may make something ready now that is more urgent.
        for kind in (NOTHING,) if ready[NOTHING] else (LINKS, CORES):
            while ready[kind] and (kind == NOTHING or free[kind] <= now):
                _, i = heapq.heappop(ready[kind])
                starts[i] = now
                heapq.heappush(ends, (now + lasts[i], i))
                if kind != NOTHING:
                    free[kind] = now + lasts[i]
        if not ends:
            return starts
        now = ends[0][0]
        while ends and ends[0][0] == now:
            for reader in readers[heapq.heappop(ends)[1]]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready[runs_on[reader]], (-path[reader], reader))
