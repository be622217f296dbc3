"""The order in which the waiting requests of one dp group are admitted: by priority, then in turns over tenants, then by arrival.

Tenants of one priority take turns by the tokens that they were served, as in VTC (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024, arXiv:2401.00588, algorithm 2): the next request is of the tenant with the fewest. An admitted request counts the tokens
of its prompt that have to be computed, a generated token counts `OUTPUT_WEIGHT`. A tenant that had nothing waiting starts level with those
that have, which the paper does by their smallest counter, and this module by the counter of the one that was admitted last (`times`):
counters below it say nothing, and are dropped.

Nobody starves. Once `ageing` times its prompt's tokens have been admitted past the request that has waited longest, that one is next,
whatever its priority and tenant; it is `aged` then, and goes before all others wherever an order matters, until it ends. So before a
request is admitted, those that came after it get at most `ageing` times the tokens of its prompt and of the older ones before it, and
one prompt more for each of these. It is charged like any other, so that a tenant gains nothing by it as long as its share is above
1 / `ageing`.

All of it is for groups in which requests of several priorities or tenants have met (`contested`); elsewhere order of arrival is all
that there is, nothing is counted, and nothing costs time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .request_state import RequestState

OUTPUT_WEIGHT = 2
"""What a generated token costs beside one of a prompt; the paper's."""

MAX_COUNTERS = 4096
"""Counters that are kept; of more, the smallest are forgotten, which are of tenants that are ahead of the others by the least."""

Key = tuple[int, str]
"""Priority and tenant."""


class Turns(NamedTuple):
    """What has been served in one dp group, as far as it decides who is next.

    Attributes:
        served: tokens by priority and tenant; one that is not there was served as much as `times` says.
        times: of each priority the counter of the tenant that was admitted last in its turn: no counter is below.
        overtaken_tokens: tokens that were admitted past the request that has waited longest, since the last that had was admitted.
    """

    served: Mapping[Key, int] = {}
    times: Mapping[int, int] = {}
    overtaken_tokens: int = 0

    def count(self, key: Key) -> int:
        """Tokens that a tenant was served at a priority."""
        return max(self.served.get(key, 0), self.times.get(key[0], 0))

    def charged(self, tokens: Mapping[Key, int]) -> Turns:
        """The turns after so many more tokens were served."""
        return self._replace(served={**self.served, **{key: self.count(key) + more for key, more in tokens.items()}})


def key_of(request: RequestState) -> Key:
    """Whose service the request is."""
    return request.request.priority, request.request.tenant


def rank(request: RequestState) -> tuple[int, int]:
    """Order of urgency, most urgent first, which is also the order of preemption, last first."""
    return request.level, request.arrival


def due(turns: Turns, oldest: RequestState, ageing: int) -> bool:
    """Whether the request that has waited longest is next, whatever its priority."""
    return turns.overtaken_tokens >= ageing * len(oldest.request.prompt)


def in_turn(
    turns: Turns, waiting: Sequence[RequestState], ageing: int, cached: Callable[[RequestState], int] = lambda _: 0
) -> Iterator[RequestState]:
    """The waiting requests in the order in which they are admitted, as if each of them was when it comes; aged where it came by age.

    Args:
        waiting: of one group, oldest first.
        cached: how many tokens of a request are in the caches.
    """
    line = _Line(turns, waiting)
    for _ in waiting:
        oldest = line.oldest
        if due(turns, oldest, ageing):
            request = line.take(oldest)._replace(aged=True)
        else:
            request = line.take(line.next_in_turn())
        turns = line.turns = _admitted(turns, request, oldest, cached(request))
        yield request


def admitted(turns: Turns, waiting: Sequence[RequestState], requests: Sequence[RequestState]) -> Turns:
    """The turns after these of the waiting requests were admitted one after the other, those of each priority as `in_turn` has them.

    What is in the caches of a request when it is admitted (`RequestState.resumed`) costs nothing.
    """
    arrivals = iter(waiting)
    gone: set[int] = set()
    oldest = next(arrivals)
    for request in requests:
        turns = _admitted(turns, request, oldest, request.num_computed_tokens)
        gone.add(request.arrival)
        while oldest.arrival in gone and len(gone) < len(waiting):
            oldest = next(arrivals)
    # A counter that is not above its priority's time says nothing.
    served = {key: count for key, count in turns.served.items() if count > turns.times.get(key[0], 0)}
    if len(served) > MAX_COUNTERS:
        served = dict(heapq.nlargest(MAX_COUNTERS, served.items(), key=lambda item: item[1] - turns.times.get(item[0][0], 0)))
    return turns._replace(served=served)


def _admitted(turns: Turns, request: RequestState, oldest: RequestState, cached: int) -> Turns:
    overtaken = 0 if request.arrival == oldest.arrival else turns.overtaken_tokens + len(request.request.prompt)
    if request.started_ms is not None:
        # It was preempted, which is not its tenant's doing.
        return turns._replace(overtaken_tokens=overtaken)
    key = key_of(request)
    count = turns.count(key)
    times = turns.times if request.aged else {**turns.times, key[0]: count}
    return Turns({**turns.served, key: count + len(request.request.prompt) - cached}, times, overtaken)


class _Line:
    """Waiting requests by level and tenant, oldest first, those of each level that were preempted before the others."""

    def __init__(self, turns: Turns, waiting: Sequence[RequestState]) -> None:
        self.turns = turns
        self._arrivals = deque(waiting)
        self._taken: set[int] = set()
        self._resumed: dict[int, deque[RequestState]] = {}
        self._tenants: dict[int, dict[Key, deque[RequestState]]] = {}
        for request in waiting:
            level = request.level
            tenants = self._tenants.setdefault(level, {})
            if request.started_ms is None:
                tenants.setdefault(key_of(request), deque()).append(request)
            else:
                self._resumed.setdefault(level, deque()).append(request)

    @property
    def oldest(self) -> RequestState:
        self._skip(self._arrivals)
        return self._arrivals[0]

    def take(self, request: RequestState) -> RequestState:
        self._taken.add(request.arrival)
        return request

    def next_in_turn(self) -> RequestState:
        for level in sorted(self._tenants):
            if resumed := self._skip(self._resumed.get(level, deque())):
                return resumed[0]
            heads = [(key, queue[0]) for key, queue in self._tenants[level].items() if self._skip(queue)]
            if len(heads) == 1:
                return heads[0][1]
            if heads:
                return min(heads, key=lambda head: (self.turns.count(head[0]), head[1].arrival))[1]
            del self._tenants[level]
        raise AssertionError("somebody waits")

    def _skip(self, queue: deque[RequestState]) -> deque[RequestState]:
        while queue and queue[0].arrival in self._taken:
            queue.popleft()
        return queue
