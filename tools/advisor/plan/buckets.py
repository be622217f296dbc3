"""The bucket lists that lose least to padding, from how often a step has how many rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....graphs.errors import SpecError
from .decode import decode_seconds, kernels
from .parameters import PlanParameters, fitted
from .predict import Prediction
from .products import Array
from .system import LoadCase

GRAPH_S = 3.1
"""Processor seconds of building one decode graph of Qwen3.5-397B: docs/lab/cpu.md."""
ENOUGH = 0.005
"""A shorter list is taken if it loses no more than this share of the time of the longest one."""
_METRIC = re.compile(r'^npucompile:decode_batch_steps_total\{(?:[^}]*,)?batch_size="(\d+)"[^}]*\} ([0-9.e+]+)$')


@dataclass(frozen=True)
class BucketList:
    """A list, the seconds of all steps with it, and with a bucket of every size."""

    buckets: tuple[int, ...]
    seconds: float
    exact: float

    @property
    def lost(self) -> float:
        """Share of the time that is padding."""
        return 1 - self.exact / self.seconds if self.seconds else 0.0


def best_lists(steps: Mapping[int, float], seconds: Callable[[Array], Array], most: int, always: Collection[int] = ()) -> list[BucketList]:
    """The optimal list of 1, 2, ... up to `most` buckets, by dynamic programming over sizes that occur.

    A size that does not occur is never better than the next smaller one that does, as a larger bucket takes no less time. Lists with
    more buckets than sizes are not made.

    Args:
        steps: how often the largest group has so many rows.
        seconds: of a step by rows; made non-decreasing.
        always: sizes that every list has.

    Raises:
        SpecError: no step, a size below 1, or fewer buckets than `always` has.
    """
    sizes = sorted({rows for rows, count in steps.items() if count > 0} | set(always))
    if not sizes or sizes[0] < 1:
        raise SpecError(f"steps of {sizes or 'no'} rows; legal is at least one size, from 1 up")
    forced = [size in set(always) or size == sizes[-1] for size in sizes]
    if most < sum(forced):
        raise SpecError(f"{most} buckets and {sum(forced)} sizes that every list has; legal is at least as many")
    cost = np.maximum.accumulate(np.asarray(seconds(np.asarray(sizes, dtype=float)), dtype=float))
    count = np.asarray([steps.get(size, 0.0) for size in sizes])
    before = np.concatenate([[0.0], np.cumsum(count)])
    exact = float((cost * count).sum())
    n = len(sizes)
    # A bucket takes the rows of all sizes since the one before it; sizes that are always there are not passed over.
    skipped = np.concatenate([[0], np.cumsum(forced)])
    best = np.where(np.arange(n + 1) == 0, 0.0, math.inf)
    choices: list[Array] = []
    lists = []
    for used in range(1, min(most, n) + 1):
        step = best[:, None] + cost[None, :] * (before[None, 1:] - before[:, None])
        first, last = np.arange(n + 1)[:, None], np.arange(n)[None, :]
        illegal = (first > last) | (skipped[None, :-1] > skipped[:, None])
        step = np.where(illegal, math.inf, step)
        chosen = np.argmin(step, axis=0)
        best = np.concatenate([[math.inf], step[chosen, np.arange(n)]])
        choices.append(chosen)
        if math.isfinite(best[n]):
            lists.append(BucketList(_walk(sizes, choices, used), float(best[n]), exact))
    return lists


def _walk(sizes: Sequence[int], choices: Sequence[Array], used: int) -> tuple[int, ...]:
    """The sizes of the list that ends with the largest."""
    at, found = len(sizes), list[int]()
    for level in range(used - 1, -1, -1):
        found.append(sizes[at - 1])
        at = int(choices[level][at - 1])
    return tuple(reversed(found))


def evaluate(buckets: Sequence[int], steps: Mapping[int, float], seconds: Callable[[Array], Array]) -> BucketList:
    """The time of a given list; rows beyond its largest bucket are split over several steps."""
    sizes = np.asarray(sorted(rows for rows, count in steps.items() if count > 0))
    grid = np.maximum.accumulate(np.asarray(seconds(np.arange(1.0, max(sizes[-1], max(buckets)) + 1)), dtype=float))
    count = np.asarray([steps[int(rows)] for rows in sizes])
    largest = max(buckets)
    total = 0.0
    for rows, times in zip(sizes.tolist(), count.tolist(), strict=True):
        whole, rest = divmod(rows, largest)
        total += times * whole * grid[largest - 1]
        total += times * grid[min(b for b in buckets if b >= rest) - 1] if rest else 0.0
    return BucketList(tuple(sorted(buckets)), float(total), float((grid[sizes - 1] * count).sum()))


def shortest(lists: Sequence[BucketList]) -> BucketList:
    """The fewest buckets that lose no more than `ENOUGH` of what the longest list takes."""
    return next(each for each in lists if each.seconds <= lists[-1].seconds * (1 + ENOUGH))


def step_seconds(case: LoadCase, context: float, parameters: PlanParameters | None = None) -> Callable[[Array], Array]:
    """Seconds of a decode step of a case by rows of a group."""
    return lambda rows: decode_seconds(case.decode, parameters or fitted(), rows, context)


def of_prediction(prediction: Prediction, case: LoadCase, most: int, always: Collection[int] = ()) -> list[BucketList]:
    """The curve for the running batch sizes of a simulation."""
    return best_lists(prediction.trace.steps, step_seconds(case, middle(prediction, case)), most, always)


def middle(prediction: Prediction, case: LoadCase) -> float:
    """The mean context of a simulation's steps."""
    total = sum(prediction.trace.decode_s.values())
    work = case.workload
    return sum(prediction.trace.context_s.values()) / total if total else work.mean_input + work.mean_output / 2


def build_list(prediction: Prediction, case: LoadCase, most: int) -> tuple[int, ...]:
    """The buckets of a build: the fewest that are good enough, the largest of which holds all that may run."""
    return shortest(of_prediction(prediction, case, most, {case.serving.max_running})).buckets


def of_metrics(text: str) -> dict[int, float]:
    """Decode steps by live rows of the largest group, from the text of a server's `/metrics`.

    Lines with other labels, as Prometheus adds for several servers, are summed.

    Raises:
        SpecError: the text counts no decode step.
    """
    steps: dict[int, float] = {}
    for line in text.splitlines():
        if found := _METRIC.match(line.strip()):
            steps[int(found[1])] = steps.get(int(found[1]), 0.0) + float(found[2])
    if not any(steps.values()):
        raise SpecError("the metrics count no decode step; legal is the text of /metrics of a server that has decoded")
    return steps


def prefill_sizes(
    prompts: Mapping[int, float],
    seconds: Callable[[int], float],
    longest: int,
    most: int,
    multiple: int = 128,
    largest: int | None = None,
) -> BucketList:
    """The optimal prefill sizes of one prompt: whole chunks of the largest, and the smallest that holds what is left.

    Every size up to `longest` is tried as the largest; for each, what is left of the prompts is a histogram like that of decode rows.

    Args:
        prompts: how many prompts have so many tokens.
        seconds: of a step of so many tokens.
        most: sizes at the most.
        multiple: of which sizes are.
        largest: the largest size if it is decided already.
    """
    best: BucketList | None = None
    top = min(longest, max(prompts))
    tried = [largest] if largest else range(multiple, -(-top // multiple) * multiple + 1, multiple)
    for size in tried:
        whole, rests = 0.0, dict[int, float]()
        for tokens, count in prompts.items():
            chunks, rest = divmod(tokens, size)
            whole += count * chunks
            if rest:
                rests[-(-rest // multiple)] = rests.get(-(-rest // multiple), 0.0) + count
        rests[size // multiple] = rests.get(size // multiple, 0.0) + whole
        always = {size // multiple} if largest else set()
        found = best_lists(rests, lambda sizes: np.asarray([seconds(int(each) * multiple) for each in sizes]), most, always)[-1]
        if best is None or found.seconds < best.seconds - 1e-12:
            best = BucketList(tuple(each * multiple for each in found.buckets), found.seconds, found.exact)
    assert best is not None
    return best


def curve_lines(lists: Sequence[BucketList], case: LoadCase, published: BucketList | None = None) -> list[str]:
    """The curve over the number of buckets as text: time lost to padding beside what each costs."""
    launches = kernels(case.decode)
    lines = [f"{'buckets':>7} {'padding %':>9} {'build s':>8} {'launches':>9}  list"]
    for each in lists:
        count = len(each.buckets)
        shown = ",".join(map(str, each.buckets))
        lines.append(f"{count:7} {100 * each.lost:9.2f} {count * GRAPH_S:8.0f} {count * launches:9,}  {shown}")
    if published is not None:
        lines.append(f"{len(published.buckets):7} {100 * published.lost:9.2f}  as published: {','.join(map(str, published.buckets))}")
    return lines
