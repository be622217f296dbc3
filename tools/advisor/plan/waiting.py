"""The waiting requests of a simulated dp group, in the order in which the scheduler that serves admits them.

Order and ageing are those of `runtime/scheduler/turns.py`. Its functions look at all that wait and count what every tenant was served; with
one tenant no count decides anything, so here the oldest request of each priority and the tokens that overtook are all that is looked at.
`tests/tools/advisor/plan/test_waiting.py` has the same order from both.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ....runtime.scheduler.policy import Policy
from ....runtime.scheduler.request_state import AGED
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


class _Next(NamedTuple):
    """A request that is next after those before it.

    Attributes:
        key: of the queue that it is in.
        level: at which it is admitted, which is its queue's unless it came by age.
        overtaken_tokens: `Turns.overtaken_tokens` once it is admitted.
    """

    request: int
    key: tuple[int, bool]
    level: int
    overtaken_tokens: int


class ByPriority:
    """Requests of several priorities, all of one tenant."""

    def __init__(self, workload: Workload) -> None:
        self._inputs, self._priorities = workload.inputs, workload.priorities
        # Of each request that ever came: at what level it is, and the how manyth it was.
        self._levels: dict[int, int] = {}
        self._arrivals: dict[int, int] = {}
        # Requests of each level, oldest first; those that lost their caches (False) before those that have not run yet (True).
        self._queues: dict[tuple[int, bool], deque[int]] = {}
        self._overtaken_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def append(self, request: int) -> None:
        """A request comes."""
        self._queues.setdefault((self._come(request), True), deque()).append(request)

    def appendleft(self, request: int) -> None:
        """A request lost its caches."""
        key = self._come(request), False
        self._queues[key] = deque(sorted((*self._queues.get(key, ()), request), key=self._arrivals.__getitem__))

    def first(self, most: int) -> Iterable[int]:
        """Up to so many requests, the next one first."""
        return (entry.request for entry in itertools.islice(self._order(), max(most, 0)))

    def admit(self, requests: Sequence[int]) -> None:
        """Takes out these, which are the first ones."""
        for entry in list(itertools.islice(self._order(), len(requests))):
            self._queues[entry.key].popleft()
            self._levels[entry.request], self._overtaken_tokens = entry.level, entry.overtaken_tokens

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

    def _order(self) -> Iterator[_Next]:
        """All that wait: the oldest where it is due (`turns.due`), else the most urgent."""
        rest = {key: iter(self._queues[key]) for key in sorted(self._queues)}
        heads = {key: request for key, queue in rest.items() if (request := next(queue, None)) is not None}
        overtaken = self._overtaken_tokens
        while heads:
            key = next(iter(heads))
            oldest = key if len(heads) == 1 else min(heads, key=lambda other: self._arrivals[heads[other]])
            aged = overtaken >= Policy.ageing * self._inputs[heads[oldest]]
            key = oldest if aged else key
            request = heads[key]
            overtaken = 0 if key == oldest else overtaken + self._inputs[request]
            yield _Next(request, key, AGED if aged else key[0], overtaken)
            following = next(rest[key], None)
            if following is None:
                del heads[key]
            else:
                heads[key] = following


Waiting = InOrder | ByPriority


def waiting(workload: Workload) -> Waiting:
    """An empty queue for requests of a workload."""
    return ByPriority(workload) if len(set(workload.priorities)) > 1 else InOrder()
