"""A closed-loop simulation of an instance that prefills and decodes, event by event.

Between two events (a request ends, a prompt can start, a client sends) all decode steps have the same rows, so that they are taken at
once. `disaggregated.py` has the instances that do only one of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ....graphs.steps.prefill import PREFILL
from ....graphs.types import Bucket
from ....runtime.scheduler.step_times import in_time
from ....runtime.steps.sizes import Cost, choose, choose_prefill, default_fixed_tokens, price
from .groups import Groups
from .prefill import PrefillTime
from .run import PhaseSpan, Trace
from .system import PlannedServing, Workload
from .table import StepTable
from .waiting import Waiting, waiting

_MOST_WAITS = 30
"""Steps that SGLang's prefill waits at most for all groups."""


class Clients:
    """Requests in order; each is sent when a place is free and its arrival has come."""

    def __init__(self, workload: Workload) -> None:
        self.requests, self.concurrency, self.arrivals = workload.requests, workload.concurrency, workload.arrivals
        self.sent, self.in_flight = 0, 0

    def due(self, now: float) -> bool:
        """Whether the next request can be sent."""
        if self.in_flight >= self.concurrency or self.sent >= self.requests:
            return False
        return not self.arrivals or self.arrivals[self.sent] <= now

    def next_arrival(self) -> float:
        """When the next request comes if a place is free; infinite where none will."""
        if not self.arrivals or self.sent >= self.requests or self.in_flight >= self.concurrency:
            return math.inf
        return self.arrivals[self.sent]

    def send(self) -> int:
        """Sends the next request, and returns its index."""
        self.sent, self.in_flight = self.sent + 1, self.in_flight + 1
        return self.sent - 1


@dataclass(frozen=True)
class SimulatedSetting:
    """What is simulated.

    Attributes:
        accepted: tokens a step of each request.
        dp: groups.
        pool_tokens: that a group's caches hold.
    """

    workload: Workload
    serving: PlannedServing
    accepted: Sequence[float]
    dp: int
    pool_tokens: float
    table: StepTable
    prefill: PrefillTime


def simulate(setting: SimulatedSetting, sizes: tuple[Bucket, ...] = ()) -> Trace:
    """Runs a workload.

    Args:
        sizes: prefill and decode buckets, of "npucompile".
    """
    return _Mixed(setting, sizes).run()


@lru_cache(maxsize=4096)
def _bucket(sizes: tuple[Bucket, ...], remaining: tuple[tuple[int, ...], ...], fixed_tokens: float, streams: int, burst: int) -> Bucket:
    """What the scheduler chooses while nothing is measured and so many requests of a group decode."""
    between = price(choose(sizes, streams), fixed_tokens) / burst if streams else 0.0
    return choose_prefill(sizes, remaining, lambda bucket: price(bucket, fixed_tokens), between)


class _Mixed:
    def __init__(self, setting: SimulatedSetting, sizes: tuple[Bucket, ...]) -> None:
        workload, serving, dp = setting.workload, setting.serving, setting.dp
        n = workload.requests
        self.work, self.serving, self.table, self.prefill, self.sizes = workload, serving, setting.table, setting.prefill, sizes
        self.fixed_tokens = (serving.fixed_tokens or default_fixed_tokens(sizes)) if sizes else 0.0
        self.clients = Clients(workload)
        self.trace = Trace([0.0] * n, [0.0] * n, [0.0] * n)
        self.groups = Groups(workload, setting.accepted, dp, setting.pool_tokens, self.trace)
        self.queues: list[Waiting] = [waiting(workload) for _ in range(dp)]
        self.remaining = [float(tokens) for tokens in workload.inputs]
        self.now, self.stall, self.bursts, self.waits, self.passes = 0.0, 0.0, 0, 0, 0
        self.prefix_known = [workload.cached == 0] * dp
        self.started: list[list[int]] = [[] for _ in range(dp)]
        self.unsent_firsts: list[int] = []
        # Of each request that decodes since the last prefill passes, what had been stalled when its first token left.
        self.late: list[float] = []
        self.prefill_ms = 0.0
        self.legal = sizes
        self.prefill_sizes = PREFILL.needed(sizes) if sizes else ()
        self._costs_ms: dict[int, dict[Bucket, float]] = {}
        self.turn, self._chunk = 0, 0
        # Requests of each group that were sent to it and have not ended.
        self.loads = [0] * dp
        self.group_of: dict[int, int] = {}
        self.taken: dict[int, float] = {}

    def run(self) -> Trace:
        groups = self.groups
        while groups.finished < self.work.requests:
            self._receive()
            if self._holds_back():
                self._decode(True)
                self._end_steps()
                continue
            if self._decodes_next():
                self._decode(self._anyone_waits())
                self._end_steps()
                continue
            parts = self._prompts()
            if parts and self._may_prefill(parts):
                self._prefill_pass(parts)
            elif groups.running:
                self._decode(bool(parts))
            else:
                self.now = max(self.now, self.clients.next_arrival())
            self._end_steps()
        return self.trace

    def _end_steps(self) -> None:
        for index in self.groups.finish(self.now):
            self.clients.in_flight -= 1
            self.loads[self.group_of[index]] -= 1
        if self.groups.retract(self.queues, self.remaining):
            self.trace.retracted += 1

    def _holds_back(self) -> bool:
        """Whether prompts that could start wait for other groups: then which ones need not be known."""
        if not self.serving.waits or not self.groups.running or self.waits >= _MOST_WAITS:
            return False
        most, counts = self.serving.max_running, self.groups.count
        able = sum(bool(own) or (bool(queue) and count < most) for own, queue, count in zip(self.started, self.queues, counts, strict=True))
        return 0 < able < len(self.queues)

    def _decodes_next(self) -> bool:
        """Whether it is the turn of a decode step whatever waits: then which prompts could start need not be known."""
        serving = self.serving
        if serving.policy != "npucompile" or serving.itl_target_ms is not None:
            return False
        return self.groups.running > 0 and self.bursts >= serving.prefill_burst

    def _anyone_waits(self) -> bool:
        """Whether any group has a prompt that it could prefill."""
        groups, found = self.groups, False
        if self.clients.sent == groups.started:
            return False
        for group, queue in enumerate(self.queues):
            if self.started[group]:
                found = True
            elif groups.count[group] < self.serving.max_running and queue:
                (index,) = queue.first(1)
                if not groups.count[group] or groups.need(index, self.remaining[index], True) <= groups.room(group, True):
                    found = True
                else:
                    self.trace.waiting += 1
        return found

    def _receive(self) -> None:
        while self.clients.due(self.now):
            index = self.clients.send()
            self.trace.sent[index] = self.now
            if self.serving.policy == "npucompile":
                group = self.loads.index(min(self.loads))
            else:
                group, self.turn = self.turn, (self.turn + 1) % len(self.queues)
            self.loads[group] += 1
            self.group_of[index] = group
            self.queues[group].append(index)

    def _may_prefill(self, parts: dict[int, list[int]]) -> bool:
        serving, self.legal = self.serving, self.sizes
        if not self.groups.running:
            return True
        if serving.policy == "npucompile" and serving.itl_target_ms is not None:
            self.legal = self._in_time(parts, serving.itl_target_ms)
            return bool(self.legal)
        if serving.policy == "npucompile":
            return self.bursts < serving.prefill_burst
        return not serving.waits or len(parts) == len(self.queues) or self.waits >= _MOST_WAITS

    def _in_time(self, parts: dict[int, list[int]], target_ms: float) -> tuple[Bucket, ...]:
        """The prefill buckets that leave time for the decode step of all that then decode, by the predicted times of both."""
        rows = self.groups.largest() + max(map(len, parts.values()))
        left_ms = target_ms - self.prefill_ms - 1e3 * self.table.most_seconds(rows, self.groups.context())
        cost = self._cost_ms(self._cached(parts))
        return tuple(in_time(self.prefill_sizes, cost, cost, left_ms, not self.bursts))

    def _cost_ms(self, cached: int) -> Cost:
        """What each prefill bucket takes where so many tokens of a prompt are cached."""
        costs = self._costs_ms.get(cached)
        if costs is None:
            costs = self._costs_ms[cached] = {bucket: 1e3 * self._padded_s(bucket, cached) for bucket in self.prefill_sizes}
        return costs.__getitem__

    def _padded_s(self, bucket: Bucket, cached: int) -> float:
        return self.prefill(bucket.batch, bucket.batch * len(self.queues), bucket.q_len, cached)

    def _prompts(self) -> dict[int, list[int]]:
        """Requests that each group can prefill now: those begun, then those that are admitted."""
        parts: dict[int, list[int]] = {}
        if self.clients.sent == self.groups.started:
            return parts
        most = self.serving.max_running
        for group, (queue, begun, count) in enumerate(zip(self.queues, self.started, self.groups.count, strict=True)):
            if not begun and (count >= most or not queue):
                continue
            chosen = self._prompts_of(group, queue, begun)
            if chosen:
                parts[group] = chosen
        return parts

    def _prompts_of(self, group: int, queue: Waiting, begun: list[int]) -> list[int]:
        """The prompts of one group that fit a step; `taken` says how many tokens of each."""
        serving, groups = self.serving, self.groups
        ours, chunk = serving.policy == "npucompile", serving.chunk
        chosen, budget, room = list[int](), float(serving.budget), None
        count, taken, before = groups.count[group], self.taken, len(begun)
        for index in itertools.chain(begun, queue.first(min(serving.max_running - count, serving.prompts) - before)):
            new = self._left(group, index)
            if chunk and new > chunk:
                new = chunk
            if new > budget and chosen:
                # Only where prompts are cut anyway does the next one fill the step.
                if not chunk or ours or budget < 1:
                    break
                new = budget
            if len(chosen) >= serving.prompts:
                break
            if len(chosen) >= before:
                if room is None:
                    room = groups.room(group, ours) - sum(self.remaining[other] for other in begun)
                need = groups.need(index, self.remaining[index], ours)
                if need > room and (count or chosen):
                    self.trace.waiting += 1
                    break
                room -= need
            chosen.append(index)
            taken[index] = new
            budget -= new
            if not self.prefix_known[group]:
                break
        return chosen

    def _prefill_pass(self, parts: dict[int, list[int]]) -> None:
        serving, groups = self.serving, self.groups
        seconds = self._padded_pass(parts) if self.sizes else self._ragged_pass(parts)
        self.trace.prefill_busy_s += seconds
        ours = serving.policy == "npucompile"
        if serving.policy == "vllm" and groups.running:
            seconds += self.table.seconds(groups.largest(), groups.context())
        if ours:
            self.trace.stalled_s += seconds * groups.running
        else:
            # Groups without a prompt decode meanwhile; with "vllm" all do.
            stalled = [] if serving.policy == "vllm" else list(parts)
            self.trace.stalled_s += seconds * groups.running
            groups.step(1, stalled)
        self.stall += seconds
        done = self._advance(parts)
        start, self.now = self.now, self.now + seconds
        self.trace.spans.append(PhaseSpan(start, self.now, "prefill", max(map(len, parts.values())), groups.running))
        self._deliver_firsts(self.now)
        for group, index in done:
            groups.start(group, index, self.remaining)
            if ours:
                self._first(index, self.now)
                self.late += [self.stall] * (self.work.outputs[index] > groups.produced[index])
            else:
                self.unsent_firsts.append(index)
        self.bursts, self.waits = self.bursts + 1, 0

    def _ragged_pass(self, parts: dict[int, list[int]]) -> float:
        counts = {group: [self.taken[index] for index in own] for group, own in parts.items()}
        total = sum(map(sum, counts.values()))
        prompts = sum(map(len, counts.values()))
        largest = max(counts.values(), key=sum)
        new = total / prompts
        # Groups differ little; the largest decides attention, all of them the experts.
        return self.prefill(max(1, round(sum(largest) / new)), prompts, round(new), self._cached(parts))

    def _padded_pass(self, parts: dict[int, list[int]]) -> float:
        most = self.prefill_sizes[-1].batch
        left = tuple(tuple(max(int(self._left(group, i)), 1) for i in own[:most]) for group, own in parts.items())
        cached = self._cached(parts)
        if self.serving.itl_target_ms is not None:
            # Nothing is counted between chunks: if there is time for one step, there is time for several that take less.
            bucket = choose_prefill(self.legal, left, self._cost_ms(cached))
        else:
            bucket = _bucket(self.sizes, left, self.fixed_tokens, self.groups.largest(), self.serving.prefill_burst)
        if any(len(own) > bucket.batch for own in parts.values()):
            for group, own in parts.items():
                parts[group] = own[: bucket.batch]
            cached = self._cached(parts)
        self._chunk = bucket.q_len
        seconds = self._padded_s(bucket, cached)
        self.prefill_ms += 1e3 * seconds
        return seconds

    def _left(self, group: int, index: int) -> float:
        """Tokens of a prompt that are to be computed; those that all prompts share only where nobody computed them."""
        left, shared = self.remaining[index], self.work.cached
        return left - shared if shared and self.prefix_known[group] and left == self.work.inputs[index] else left

    def _cached(self, parts: dict[int, list[int]]) -> int:
        """Tokens of a prompt that are in the cache before the step, on average."""
        if not self.work.cached and not any(self.started[group] for group in parts):
            return 0
        cached = [self.work.inputs[i] - min(self._left(g, i), self.work.inputs[i]) for g, own in parts.items() for i in own]
        return round(sum(cached) / len(cached))

    def _advance(self, parts: dict[int, list[int]]) -> list[tuple[int, int]]:
        """Moves the prompts of a pass on; returns those that are whole."""
        done = []
        for group, own in parts.items():
            if new := own[len(self.started[group]) :]:
                self.queues[group].admit(new)
                self.started[group] = self.queues[group].urgent_first([*self.started[group], *new])
            for index in own:
                left = self._left(group, index)
                step = min(left, self._chunk) if self.sizes else self.taken[index]
                self.remaining[index] = left - step
                if self.remaining[index] <= 0:
                    self.remaining[index] = 0.0
                    self.started[group].remove(index)
                    done.append((group, index))
            self.prefix_known[group] = True
        return done

    def _first(self, index: int, now: float) -> None:
        early = self.serving.early_first_s
        if not self.trace.first[index]:
            self.trace.first[index] = now if early is None else min(now, self.trace.sent[index] + early)

    def _deliver_firsts(self, now: float) -> None:
        """The first tokens of the pass before leave with this step: results are read one step late."""
        for index in self.unsent_firsts:
            self._first(index, now)
        self.unsent_firsts.clear()

    def _decode(self, prompts_wait: bool) -> None:
        groups, trace = self.groups, self.trace
        rows, context = groups.largest(), groups.context()
        seconds = self.table.seconds(rows, context)
        count = groups.until_finish()
        if prompts_wait:
            count = min(count, max(_MOST_WAITS - self.waits, 1)) if self.serving.waits else 1
        if (arrival := self.clients.next_arrival()) < math.inf:
            count = min(count, max(1, math.ceil((arrival - self.now) / seconds)))
        count = max(1, min(count, groups.until_full()))
        if count > 1:
            seconds = self.table.seconds(rows, context + groups.growth() * (count - 1) / 2)
        self._deliver_firsts(self.now + seconds)
        running = groups.running
        trace.decode(self.now, count, seconds, rows, running, context)
        self.now += count * seconds
        groups.step(count, ())
        trace.gaps.append((seconds + self.stall, max(running - len(self.late), 0)))
        trace.gaps += [(seconds + self.stall - stall, 1) for stall in self.late]
        if count > 1:
            trace.gaps.append((seconds, running * (count - 1)))
        self.stall, self.bursts, self.prefill_ms = 0.0, 0, 0.0
        self.late.clear()
        self.waits = self.waits + count if prompts_wait else 0
