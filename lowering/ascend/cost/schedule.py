"""When each operator of a step runs: streams in order, data before readers, one kernel at a time on the cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .timing import CAUSES, Duration

_ROUNDING = 1e-9

_Interval = tuple[float, float, int]
"""Start, end and the number of the task."""


@dataclass(frozen=True, slots=True)
class Task:
    """One launch.

    Attributes:
        after: positions of earlier tasks that it waits for.
        stream: label of its stream; "" is the graph's own.
    """

    duration: Duration
    after: tuple[int, ...]
    stream: str = ""


@dataclass(frozen=True)
class Timeline:
    """Seconds of one step.

    Attributes:
        step_s: from the first launch to the end of the last operator.
        exposed: for each task the seconds that it alone accounts for, by cause; those of all tasks and `waiting_s` add up to `step_s`.
        waiting_s: time in which nothing runs.
    """

    step_s: float
    exposed: tuple[dict[str, float], ...]
    waiting_s: float


def schedule(tasks: Sequence[Task], contention: float = 1.0) -> Timeline:
    """Runs the tasks of each stream in their order: each starts when what it reads is there and, if it computes, the cores are free.

    Kernels of different streams share the cores of one NPU, so they add up; messages run beside them. Only what is not covered by a
    kernel counts as a collective's exposed time.

    Args:
        contention: how many times as long a kernel takes while a message travels, whose own kernel takes cores and memory.
    """
    kernels: list[_Interval] = []
    messages: list[_Interval] = []
    for interval in intervals(tasks, contention):
        (kernels if tasks[interval[2]].duration.on_cores else messages).append(interval)
    exposed: list[dict[str, float]] = [{} for _ in tasks]
    for start, end, number in kernels:
        duration = tasks[number].duration
        exposed[number] = {"launch": duration.launch_s, duration.cause: end - start - duration.launch_s}
    step = max((end for _, end, _ in (*kernels, *messages)), default=0.0)
    covered = sum(end - start for start, end, _ in kernels)
    for start, end, number in _uncovered(kernels, messages):
        cause = tasks[number].duration.cause
        exposed[number][cause] = exposed[number].get(cause, 0.0) + end - start
        covered += end - start
    waiting = step - covered
    return Timeline(step, tuple(exposed), waiting if waiting > _ROUNDING * step else 0.0)


def intervals(tasks: Sequence[Task], contention: float = 1.0) -> list[_Interval]:
    """Start, end and number of each task, as they begin.

    Runs, of the next tasks of all streams, the one that can start first; of equal ones that of the graph's own stream.

    Which of two streams gets the cores is not documented; streams of their own are for what may wait.
    """
    queues: dict[str, deque[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, deque()).append(number)
    free = dict.fromkeys(queues, 0.0)
    begun, ends = list[_Interval](), list[float | None]([None] * len(tasks))
    travel = list[tuple[float, float]]()
    kernel: tuple[float, int] | None = None

    def end(start: float, number: int) -> float:
        task = tasks[number]
        slow = contention if task.duration.on_cores else 1.0
        ends[number] = free[task.stream] = until = start + _slowed(start, task.duration.total_s, travel, slow)
        return until

    while queues:
        starts = []
        cores = 0.0 if kernel is None else ends[kernel[1]] or 0.0
        for stream, queue in queues.items():
            task = tasks[queue[0]]
            before = [ends[i] for i in task.after]
            if None not in before:
                ready = max([free[stream], *(end for end in before if end is not None)])
                starts.append((max(ready, cores) if task.duration.on_cores else ready, stream != "", queue[0]))
        start, _, number = min(starts)
        until = end(start, number)
        if not tasks[number].duration.on_cores:
            _add(travel, start, until)
            # The kernel that runs already takes longer from now on; nothing that waits for it has begun.
            if kernel is not None and contention > 1 and start < cores:
                end(*kernel)
        else:
            kernel = start, number
        begun.append((start, until, number))
        queue = queues[tasks[number].stream]
        queue.popleft()
        if not queue:
            del queues[tasks[number].stream]
    return [(start, ends[number] or 0.0, number) for start, _, number in begun]


def _add(travel: list[tuple[float, float]], start: float, end: float) -> None:
    """Joins a message, which begins no earlier than those before it, to the times in which messages travel."""
    if travel and start <= travel[-1][1]:
        travel[-1] = travel[-1][0], max(travel[-1][1], end)
    else:
        travel.append((start, end))


def _slowed(start: float, seconds: float, travel: Sequence[tuple[float, float]], slow: float) -> float:
    """How long a kernel takes from `start` on that alone takes `seconds`."""
    if slow == 1:
        return seconds
    now, left = start, seconds
    first = len(travel)
    while first and travel[first - 1][1] > start:
        first -= 1
    for begin, end in travel[first:]:
        alone = min(left, max(0.0, begin - now))
        now, left = now + alone, left - alone
        beside = min(left * slow, max(0.0, end - now))
        now, left = now + beside, left - beside / slow
    return now + left - start


def _uncovered(kernels: Sequence[_Interval], messages: Sequence[_Interval]) -> list[_Interval]:
    """Parts of messages during which neither a kernel nor an earlier message runs. Kernels are disjoint and in order."""
    parts, first, last = [], 0, 0.0
    for start, end, number in sorted(messages):
        at = max(start, last)
        while first < len(kernels) and kernels[first][1] <= at:
            first += 1
        i = first
        while at < end:
            stop = min(end, kernels[i][0]) if i < len(kernels) else end
            if stop > at:
                parts.append((at, stop, number))
            if i >= len(kernels):
                break
            at = max(at, kernels[i][1])
            i += 1
        last = max(last, end)
    return parts


def total(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Seconds by cause, of all causes."""
    sums = dict.fromkeys(CAUSES, 0.0)
    for part in parts:
        for cause, seconds in part.items():
            sums[cause] += seconds
    return sums
