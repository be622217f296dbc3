"""The waiting requests of a simulated dp group, in the order in which the scheduler that serves admits them.

Order and ageing are those of `runtime/scheduler/turns.py`. Its functions look at all that wait and count what every tenant was served; with
one tenant no count decides anything, so here the oldest request of each priority and the tokens that overtook are all that is looked at.
`tests/tools/plan/test_waiting.py` has the same order from both.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...runtime.scheduler.policy import Policy
from ...runtime.scheduler.request_state import AGED
from .system import Workload


class InOrder(deque[int]):
    """Requests of one priority, by arrival; those that lost their caches first."""

    def first(self, most: int) -> Iterable[int]:
        """Up to so many requests, the next one first."""
        return itertools.islice(self, max(most, 0))

    def admit(self, requests: Sequence[int]) -> None:
        """Takes out these, which are the first ones."""
        for _ in requests:
            self.popleft()

    def urgent_first(self, running: list[int]) -> list[int]:
        """Requests that were admitted in this order, most urgent first."""
        return running

    def level(self, request: int) -> int:
        """Higher is less urgent, whatever the order of arrival."""
        return 0


class _Queue(NamedTuple):
    """Requests of one level that have not run yet, or that lost their caches, oldest first.

    Attributes:
        key: order in which queues are served: by level, those that lost their caches first.
    """

    key: tuple[int, bool]
    requests: deque[int]


class _Next(NamedTuple):
    """A request that is next after those before it.

    Attributes:
        queue: from which it was taken.
        level: at which it is admitted, which is its queue's unless it came by age.
        overtaken_tokens: `Turns.overtaken_tokens` once it is admitted.
    """

    request: int
    queue: _Queue
    level: int
    overtaken_tokens: int


class ByPriority:
    """Requests of several priorities, all of one tenant."""

    def __init__(self, workload: Workload) -> None:
        self._inputs, self._priorities = workload.inputs, workload.priorities
        # Of each request that ever came: at what level it is, and the how manyth it was.
        self._levels: dict[int, int] = {}
        self._arrivals: dict[int, int] = {}
        self._queues: list[_Queue] = []
        # Who is next, as far as that was asked for; these are not in their queues.
        self._next: deque[_Next] = deque()
        self._overtaken_tokens = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, request: int) -> None:
        """A request comes."""
        level = self._come(request)
        self._queue((level, True)).requests.append(request)
        self._count += 1
        # Before those of lower priority; ahead of these it changes nothing, as it is the last to come.
        for place, other in enumerate(self._next):
            if level < other.level:
                self._forget(place)
                break

    def appendleft(self, request: int) -> None:
        """A request lost its caches."""
        self._forget(0)
        requests = self._queue((self._come(request), False)).requests
        ordered = sorted((*requests, request), key=self._arrivals.__getitem__)
        requests.clear()
        requests.extend(ordered)
        self._count += 1

    def first(self, most: int) -> Iterable[int]:
        """Up to so many requests, the next one first."""
        most = min(most, self._count)
        if most <= 0:
            return ()
        while len(self._next) < most:
            self._next.append(self._one_more())
        return [each.request for each in itertools.islice(self._next, most)]

    def admit(self, requests: Sequence[int]) -> None:
        """Takes out these, which are the first ones."""
        self.first(len(requests))
        for request in requests:
            entry = self._next.popleft()
            self._levels[request], self._overtaken_tokens = entry.level, entry.overtaken_tokens
        self._count -= len(requests)

    def urgent_first(self, running: list[int]) -> list[int]:
        """Requests that were admitted, most urgent first."""
        return sorted(running, key=lambda request: (self._levels[request], self._arrivals[request]))

    def level(self, request: int) -> int:
        """Higher is less urgent, whatever the order of arrival."""
        return self._come(request)

    def _come(self, request: int) -> int:
        """The level of a request. The first time it is asked for, or comes, is its arrival."""
        self._arrivals.setdefault(request, len(self._arrivals))
        return self._levels.setdefault(request, self._priorities[request])

    def _queue(self, key: tuple[int, bool]) -> _Queue:
        for queue in self._queues:
            if queue.key == key:
                return queue
        self._queues.append(_Queue(key, deque()))
        self._queues.sort(key=lambda queue: queue.key)
        return self._queue(key)

    def _one_more(self) -> _Next:
        """Takes who comes after those that are next from its queue: the oldest where it is due (`turns.due`), else the most urgent."""
        queues = [queue for queue in self._queues if queue.requests]
        chosen = oldest = queues[0]
        if len(queues) > 1:
            oldest = min(queues, key=lambda queue: self._arrivals[queue.requests[0]])
        overtaken = self._next[-1].overtaken_tokens if self._next else self._overtaken_tokens
        aged = overtaken >= Policy.ageing * self._inputs[oldest.requests[0]]
        if aged:
            chosen = oldest
        request = chosen.requests.popleft()
        overtaken = 0 if chosen is oldest else overtaken + self._inputs[request]
        return _Next(request, chosen, AGED if aged else chosen.key[0], overtaken)

    def _forget(self, place: int) -> None:
        """Those that are next from a place on are in their queues again."""
        while len(self._next) > place:
            entry = self._next.pop()
            entry.queue.requests.appendleft(entry.request)


Waiting = InOrder | ByPriority


def waiting(workload: Workload) -> Waiting:
    """An empty queue for requests of a workload."""
    return ByPriority(workload) if len(set(workload.priorities)) > 1 else InOrder()
