"""When each operator of a step runs: streams in order, data before readers, one kernel at a time on the cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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


def schedule(tasks: Sequence[Task]) -> Timeline:
    """Runs the tasks of each stream in their order: each starts when what it reads is there and, if it computes, the cores are free.

    Kernels of different streams share the cores of one NPU, so they add up; messages run beside them. Only what is not covered by a
    kernel counts as a collective's exposed time.
    """
    kernels: list[_Interval] = []
    messages: list[_Interval] = []
    for interval in _intervals(tasks):
        (messages if tasks[interval[2]].duration.cause == "collectives" else kernels).append(interval)
    exposed: list[dict[str, float]] = [{} for _ in tasks]
    for start, end, number in kernels:
        duration = tasks[number].duration
        exposed[number] = {"launch": duration.launch_s, duration.cause: end - start - duration.launch_s}
    step = max((end for _, end, _ in (*kernels, *messages)), default=0.0)
    covered = sum(end - start for start, end, _ in kernels)
    for start, end, number in _uncovered(kernels, messages):
        exposed[number]["collectives"] = exposed[number].get("collectives", 0.0) + end - start
        covered += end - start
    waiting = step - covered
    return Timeline(step, tuple(exposed), waiting if waiting > _ROUNDING * step else 0.0)


def _intervals(tasks: Sequence[Task]) -> Iterator[_Interval]:
    """Runs, of the next tasks of all streams, the one that can start first; of equal ones that of the graph's own stream.

    Which of two streams gets the cores is not documented; streams of their own are for what may wait.
    """
    queues: dict[str, deque[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, deque()).append(number)
    free = dict.fromkeys(queues, 0.0)
    ends: list[float | None] = [None] * len(tasks)
    cores = 0.0
    while queues:
        starts = []
        for stream, queue in queues.items():
            task = tasks[queue[0]]
            before = [ends[i] for i in task.after]
            if None not in before:
                ready = max([free[stream], *(end for end in before if end is not None)])
                starts.append((ready if task.duration.cause == "collectives" else max(ready, cores), stream != "", queue[0]))
        start, _, number = min(starts)
        task = tasks[number]
        end = start + task.duration.total_s
        free[task.stream] = ends[number] = end
        cores = cores if task.duration.cause == "collectives" else end
        queues[task.stream].popleft()
        if not queues[task.stream]:
            del queues[task.stream]
        yield start, end, number


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
