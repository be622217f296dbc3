"""The running requests of all dp groups: when each ends, and how many tokens they cache, without a loop over requests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence

from .run import Trace
from .system import Workload
from .waiting import Waiting

RESERVED = 0.4
"""Share of the remaining outputs that SGLang keeps free when it admits; 0.2 with several groups."""
RESERVED_GROUPS = 0.2


class Groups:
    """Requests advance by their own acceptance at every step of their group, so each one's last step is known when it starts.

    Ends are kept in a heap by the step of the whole instance; a group that misses a step (it prefills) pushes its requests back by one,
    which is applied when they come to the top.

    Args:
        accepted: tokens a step of each request.
        pool_tokens: that a group's caches hold.
    """

    def __init__(self, workload: Workload, accepted: Sequence[float], dp: int, pool_tokens: float, trace: Trace) -> None:
        self.work, self.accepted, self.trace = workload, accepted, trace
        self.pool = pool_tokens
        self.reserved = RESERVED if dp == 1 else RESERVED_GROUPS
        self.count = [0] * dp
        self.missed = [0] * dp
        self.base = [0.0] * dp
        self.rate = [0.0] * dp
        self.full = [0.0] * dp
        # Sums over groups: of base, of rate, and of rate times missed steps.
        self._base, self._rate, self._lag = 0.0, 0.0, 0.0
        self._crowded: set[int] = set()
        self.at, self.running, self.finished, self.started = 0, 0, 0, 0
        self._ends: list[tuple[int, int, int, int, int]] = []
        self._live: dict[int, tuple[int, float, float, int]] = {}
        self._version = [0] * workload.requests
        self.produced = [1.0] * workload.requests

    def start(self, group: int, index: int, remaining: list[float]) -> None:
        """A request whose prompt is in the cache begins to decode."""
        done = self.produced[index]
        rate = self.accepted[index]
        own = self.at - self.missed[group]
        steps = max(1, math.ceil((self.work.outputs[index] - done) / rate - 1e-9))
        base = self.work.inputs[index] + done - rate * own
        self.count[group] += 1
        self.running += 1
        self.started += 1
        self.base[group] += base
        self.rate[group] += rate
        self._base, self._rate, self._lag = self._base + base, self._rate + rate, self._lag + rate * self.missed[group]
        self._fill(group, self.work.inputs[index] + self.work.outputs[index])
        self._live[index] = group, base, rate, own
        self._version[index] += 1
        if self.work.outputs[index] <= done:
            steps = 0
        heapq.heappush(self._ends, (self.at + steps, index, group, self.missed[group], self._version[index]))

    def step(self, count: int, without: Collection[int]) -> None:
        """So many steps of all groups but some."""
        self.at += count
        for group in without:
            self.missed[group] += count
            self._lag += self.rate[group] * count

    def _fill(self, group: int, tokens: float) -> None:
        """Counts the tokens that a group will cache at the most, and notes whether those exceed its caches."""
        self.full[group] += tokens
        if self.full[group] - (self.count[group] - 1) * self.work.cached > self.pool and self.count[group] > 1:
            self._crowded.add(group)
        else:
            self._crowded.discard(group)

    def _settle(self) -> None:
        """Makes the top of the heap a request that runs, at the step at which it ends."""
        ends = self._ends
        while ends:
            at, index, group, missed, version = ends[0]
            if version != self._version[index] or index not in self._live:
                heapq.heappop(ends)
            elif missed != self.missed[group]:
                heapq.heapreplace(ends, (at + self.missed[group] - missed, index, group, self.missed[group], version))
            else:
                return

    def until_finish(self) -> int:
        """Steps until the next request ends; at least 1."""
        self._settle()
        return max(self._ends[0][0] - self.at, 1) if self._ends else 1

    def finish(self, now: float) -> Iterator[int]:
        """Ends the requests whose last step was taken."""
        while True:
            self._settle()
            if not self._ends or self._ends[0][0] > self.at:
                return
            index = heapq.heappop(self._ends)[1]
            self._remove(index)
            self.trace.end[index] = now
            self.finished += 1
            if not self.trace.first[index]:
                self.trace.first[index] = now
            yield index

    def _remove(self, index: int) -> int:
        group, base, rate, _ = self._live.pop(index)
        self.count[group] -= 1
        self.running -= 1
        self.base[group] -= base
        self.rate[group] -= rate
        self._base, self._rate, self._lag = self._base - base, self._rate - rate, self._lag - rate * self.missed[group]
        self._fill(group, -self.work.inputs[index] - self.work.outputs[index])
        return group

    def largest(self) -> int:
        """Most requests of a group."""
        return max(self.count)

    def context(self) -> float:
        """Cached tokens of a request on average."""
        return (self._base + self._rate * self.at - self._lag) / max(self.running, 1)

    def growth(self) -> float:
        """Tokens a request and step."""
        return self._rate / max(self.running, 1)

    def used(self, group: int) -> float:
        """Cached tokens of a group; a shared prefix counts once."""
        own = self.base[group] + self.rate[group] * (self.at - self.missed[group])
        return own - max(self.count[group] - 1, 0) * self.work.cached

    def room(self, group: int, ours: bool) -> float:
        """Tokens that can be admitted."""
        used = self.used(group)
        if ours:
            return self.pool - used
        left = max(self.full[group] - self.count[group] * self.work.cached - used, 0.0)
        return self.pool - used - self.reserved * left

    def need(self, index: int, remaining: float, ours: bool) -> float:
        """Tokens that a request must find to be admitted."""
        own = self.work.inputs[index] - self.work.cached + self.produced[index]
        return own if ours else own + self.reserved * (self.work.outputs[index] - self.produced[index])

    def until_full(self) -> int:
        """Steps until a group's caches are full."""
        steps = 1 << 30
        for group in self._crowded:
            steps = min(steps, int((self.pool - self.used(group)) / max(self.rate[group], 1e-9)) + 1)
        return max(steps, 1)

    def retract(self, queues: Sequence[Waiting], remaining: list[float]) -> bool:
        """Takes the caches of the least urgent requests, of those with least progress, in groups that are over; they queue again."""
        any_taken = False
        for group in tuple(self._crowded):
            while self.count[group] > 1 and self.used(group) > self.pool:
                level = queues[group].level
                index = max((i for i, live in self._live.items() if live[0] == group), key=lambda i: (level(i), self._live[i][3]))
                _, base, rate, _ = self._live[index]
                tokens = base + rate * (self.at - self.missed[group])
                self.produced[index] = min(tokens - self.work.inputs[index], self.work.outputs[index] - 1.0)
                remaining[index] = tokens
                self._remove(index)
                self.started -= 1
                self._version[index] += 1
                queues[group].appendleft(index)
                any_taken = True
        return any_taken
