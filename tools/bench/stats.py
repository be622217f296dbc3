"""Statistics of repeated measurements.

The speed of a shared machine varies from minute to minute. Candidates are therefore run alternately, ratios are taken within a round,
and a report gives the median over rounds with the smallest and the largest value.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")

Clock = Callable[[], float]
"""A monotonic clock in seconds."""


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of several measurements.

    Attributes:
        count: number of measurements.
    """

    median: float
    low: float
    high: float
    count: int


def spread(samples: Iterable[float]) -> Spread:
    """The spread of at least one sample.

    Raises:
        ValueError: there is no sample.
    """
    values = sorted(samples)
    if not values:
        raise ValueError("a spread of no samples; legal is at least one")
    return Spread(statistics.median(values), values[0], values[-1], len(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Spread of `above[i] / below[i]`, ratios within one round, in which a slow minute of the machine cancels."""
    return spread(a / b for a, b in zip(above, below, strict=True))


def interleave(contenders: Mapping[K, Callable[[], T]], rounds: int, *, after: Callable[[int], None] = lambda _: None) -> dict[K, list[T]]:
    """Calls every contender once per round, every second round in reverse order so that none is always first.

    Args:
        rounds: those that count, after one that does not.
        after: called after each round with its number, the uncounted ones among them.

    Returns:
        One result per counted round, by contender.
    """
    results: dict[K, list[T]] = {name: [] for name in contenders}
    for i in range(1 + rounds):
        names = list(contenders)
        for name in names if i % 2 == 0 else reversed(names):
            result = contenders[name]()
            if i:
                results[name].append(result)
        after(i)
    return results


def seconds_per_call(call: Callable[[], object], clock: Clock, *, calls: int) -> float:
    """Median seconds of `calls` consecutive calls, after an uncounted one that warms the caches."""
    call()
    seconds = []
    for _ in range(calls):
        began = clock()
        call()
        seconds.append(clock() - began)
    return statistics.median(seconds)
