"""The waiting requests of a simulated dp group, in the order in which the scheduler that serves admits them.

Order and ageing are those of `runtime/scheduler/turns.py`, whose functions decide here too. They look at all that wait; here they are shown
the first few of each priority, among which the next few always are.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from ...runtime.request import Request
from ...runtime.scheduler.policy import Policy
from ...runtime.scheduler.request_state import RequestState
from ...runtime.scheduler.turns import Turns, admitted, in_turn, rank
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


class ByPriority:
    """Requests of several priorities, all of one tenant."""

    def __init__(self, workload: Workload) -> None:
        self._work = workload
        self._turns = Turns()
        self._states: dict[int, RequestState] = {}
        self._of_arrival: list[int] = []
        # Of each level those that have not run yet, and those that lost their caches; all in order of arrival.
        self._new: dict[int, deque[int]] = {}
        self._resumed: dict[int, deque[int]] = {}
        self._count = 0
        # Who is next, as far as that is known, and how many were asked for at the most.
        self._next: list[RequestState] = []
        self._most = 0

    def __len__(self) -> int:
        return self._count

    def append(self, request: int) -> None:
        """A request comes."""
        level = self._state(request).level
        self._new.setdefault(level, deque()).append(request)
        self._count += 1
        # Before those of lower priority; ahead of these it changes nothing, as it is the last to come.
        for place, other in enumerate(self._next):
            if level < other.request.priority:
                del self._next[place:]
                break

    def appendleft(self, request: int) -> None:
        """A request lost its caches."""
        state = self._states[request] = self._state(request)._replace(started_ms=0.0)
        queue = (*self._resumed.get(state.level, ()), request)
        self._resumed[state.level] = deque(sorted(queue, key=lambda each: self._states[each].arrival))
        self._count += 1
        self._next.clear()

    def first(self, most: int) -> Iterable[int]:
        """Up to so many requests, the next one first."""
        most = min(most, self._count)
        if most <= 0:
            return ()
        if len(self._next) < most:
            self._most = max(most, self._most)
            self._next = list(itertools.islice(in_turn(self._turns, self._shown(self._most), Policy.ageing), self._most))
        return [self._of_arrival[state.arrival] for state in self._next[:most]]

    def admit(self, requests: Sequence[int]) -> None:
        """Takes out these, which are the first ones."""
        if not requests:
            return
        self.first(len(requests))
        states = self._next[: len(requests)]
        self._turns = admitted(self._turns, self._shown(len(requests)), states)
        for request, state in zip(requests, states, strict=True):
            queues = self._new if state.started_ms is None else self._resumed
            queues[self._states[request].level].popleft()
            self._states[request] = state
        self._count -= len(requests)
        # The rest was next as if these were admitted.
        del self._next[: len(requests)]

    def urgent_first(self, running: list[int]) -> list[int]:
        """Requests that were admitted, most urgent first."""
        return sorted(running, key=lambda request: rank(self._states[request]))

    def level(self, request: int) -> int:
        """Higher is less urgent, whatever the order of arrival."""
        return self._state(request).level

    def _state(self, request: int) -> RequestState:
        if request not in self._states:
            prompt = _prompt(self._work.inputs[request], self._work.priorities[request])
            self._states[request] = RequestState(prompt, len(self._of_arrival), 0.0)
            self._of_arrival.append(request)
        return self._states[request]

    def _shown(self, most: int) -> list[RequestState]:
        """The first so many of each queue, oldest first: each of the next ones is the head of its queue when its turn comes."""
        heads: Iterator[deque[int]] = itertools.chain(self._new.values(), self._resumed.values())
        states = [self._states[request] for queue in heads for request in itertools.islice(queue, most)]
        return sorted(states, key=lambda state: state.arrival)


Waiting = InOrder | ByPriority


def waiting(workload: Workload) -> Waiting:
    """An empty queue for requests of a workload."""
    return ByPriority(workload) if len(set(workload.priorities)) > 1 else InOrder()


@functools.lru_cache(maxsize=4096)
def _prompt(tokens: int, priority: int) -> Request:
    """What turns depend on. Nobody looks at the tokens, of which a range has the number without the memory."""
    return Request("", cast("tuple[int, ...]", range(tokens)), 1, priority=priority)
