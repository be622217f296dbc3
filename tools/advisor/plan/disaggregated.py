"""A closed-loop simulation of instances that only prefill beside one kind that only decodes."""

from __future__ import annotations

import heapq
import math

from .groups import Groups
from .prefill import PrefillTime
from .run import Trace
from .simulate import Clients, SimulatedSetting
from .system import PlannedServing, Workload
from .waiting import waiting

HANDOVER_S = 0.35
"""From the end of a prompt's prefill to its request at the decode instance, without the transfer: fit to published rows."""
TRANSFER_BYTES_PER_S = 20e9


class _Prefiller:
    """One instance: a queue, and the batch that it computes."""

    def __init__(self, groups: int, serving: PlannedServing, seconds: PrefillTime, workload: Workload) -> None:
        self.groups, self.serving, self.seconds, self.work = groups, serving, seconds, workload
        self.queue = waiting(workload)
        self.batch: list[int] = []
        self.done = math.inf
        self.known = workload.cached == 0

    def start(self, now: float) -> float:
        """Begins the next batch if it is idle; returns how long that takes."""
        if self.batch or not self.queue:
            return 0.0
        most, tokens = self.serving.max_running * self.groups, 0.0
        for index in self.queue.first(most):
            new = self.work.inputs[index] - (self.work.cached if self.known else 0)
            if self.batch and tokens + new > self.serving.budget * self.groups:
                break
            tokens += new
            self.batch.append(index)
        self.queue.admit(self.batch)
        largest = -(-len(self.batch) // self.groups)
        cached = self.work.cached if self.known else 0
        taken = self.seconds(largest, len(self.batch), round(tokens / len(self.batch)), cached)
        self.known, self.done = True, now + taken
        return taken

    def finish(self) -> list[int]:
        """The batch, which is done."""
        batch, self.batch, self.done = self.batch, [], math.inf
        return batch


def simulate_disaggregated(
    setting: SimulatedSetting,
    prefill_serving: PlannedServing,
    prefill_groups: int,
    instances: int,
    transfer_bytes: float,
    decode_instances: int = 1,
) -> Trace:
    """Runs a workload.

    Args:
        setting: of one decode instance; several instances advance as one, with the groups of all.
        prefill_groups, instances: groups of a prefill instance, and how many of those there are.
        transfer_bytes: of one token's caches.
    """
    workload, serving, table = setting.workload, setting.serving, setting.table
    n, dp = workload.requests, setting.dp * decode_instances
    trace, clients = Trace([0.0] * n, [0.0] * n, [0.0] * n), Clients(workload)
    groups = Groups(workload, setting.accepted, dp, setting.pool_tokens, trace)
    servers = [_Prefiller(prefill_groups, prefill_serving, setting.prefill, workload) for _ in range(instances)]
    # Requests whose prompts are done: those on their way with the times at which they come, and those that wait for a place.
    ready: list[tuple[float, int]] = []
    arrived = waiting(workload)
    retracted = [waiting(workload) for _ in range(dp)]
    remaining = [0.0] * n
    now, server_turn, group_turn = 0.0, 0, 0
    # When the next prefill instance is done.
    prefilled = math.inf
    while groups.finished < n:
        if clients.due(now):
            while clients.due(now):
                index = clients.send()
                trace.sent[index] = now
                servers[server_turn].queue.append(index)
                server_turn = (server_turn + 1) % instances
            for server in servers:
                trace.prefill_busy_s += server.start(now)
            prefilled = min(server.done for server in servers)
        while prefilled <= now:
            server = min(servers, key=lambda each: each.done)
            for index in server.finish():
                moved = HANDOVER_S + workload.inputs[index] * transfer_bytes / TRANSFER_BYTES_PER_S
                heapq.heappush(ready, (prefilled + moved, index))
            trace.prefill_busy_s += server.start(prefilled)
            prefilled = min(server.done for server in servers)
        for group, queue in enumerate(retracted if trace.retracted else ()):
            while groups.count[group] < serving.max_running and (first := list(queue.first(1))):
                if groups.need(first[0], 0.0, False) > groups.room(group, False):
                    break
                queue.admit(first)
                groups.start(group, first[0], remaining)
        while ready and ready[0][0] <= now:
            arrived.append(heapq.heappop(ready)[1])
        while arrived:
            first = list(arrived.first(1))
            index = first[0]
            chosen = _place(groups, serving, index, group_turn, dp)
            if chosen is None:
                break
            arrived.admit(first)
            group_turn = (chosen + 1) % dp
            trace.first[index] = now
            groups.start(chosen, index, remaining)
        upcoming = min(
            ready[0][0] if ready and not arrived else math.inf,
            prefilled,
            clients.next_arrival(),
        )
        if not groups.running:
            if upcoming == math.inf:
                raise RuntimeError("nothing runs and nothing comes: a request that no pool holds")
            now = max(now, upcoming)
            continue
        rows, context = groups.largest(), groups.context()
        seconds = table.seconds(rows, context)
        count = min(groups.until_finish(), groups.until_full())
        if upcoming < math.inf:
            count = min(count, max(1, math.ceil((upcoming - now) / seconds)))
        if count > 1:
            seconds = table.seconds(rows, context + groups.growth() * (count - 1) / 2)
        trace.decode(now, count, seconds, rows, groups.running, context)
        trace.gaps.append((seconds, groups.running * count))
        now += count * seconds
        groups.step(count, ())
        for _ in groups.finish(now):
            clients.in_flight -= 1
        trace.retracted += groups.retract(retracted, remaining)
    return trace


def _place(groups: Groups, serving: PlannedServing, index: int, turn: int, dp: int) -> int | None:
    """The next group in turn that has a place and room; None where none has."""
    for offset in range(dp):
        group = (turn + offset) % dp
        if groups.count[group] >= serving.max_running:
            continue
        if not groups.count[group] or groups.need(index, 0.0, False) <= groups.room(group, False):
            return group
    return None
