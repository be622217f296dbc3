"""Turns repeated measurements into medians with their spread.

A machine that other people share is faster in some minutes than in others. So what is compared is run alternately, a ratio
is taken within each round, and what is reported is the median over rounds with the smallest and the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

Clock = Callable[[], float]
"""Seconds, never going back."""


@dataclass(frozen=True)
class Spread:
    """What several measurements of one quantity say of it.

    Attributes:
        count: measurements.
    """

    median: float
    low: float
    high: float
    count: int


def spread(samples: Iterable[float]) -> Spread:
    """Median, smallest and largest of at least one sample.

    Raises:
        ValueError: there is none.
    """
    values = sorted(samples)
    if not values:
        raise ValueError("a spread of no samples; legal is at least one")
    return Spread(statistics.median(values), values[0], values[-1], len(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Spread of `above[i] / below[i]`: both of one round, so that a slow minute of the machine cancels."""
    return spread(a / b for a, b in zip(above, below, strict=True))


def interleave(contenders: Mapping[str, Callable[[], T]], rounds: int, *, warmup: int = 1) -> dict[str, list[T]]:
    """Calls every contender once a round, in turns: every second round in reverse order, so that none is always first.

    Args:
        rounds: rounds whose results count.
        warmup: rounds before those.

    Returns:
        One result per counted round, by contender.
    """
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for i in range(warmup + rounds):
        names = list(contenders)
        for name in names if i % 2 == 0 else reversed(names):
            result = contenders[name]()
            if i >= warmup:
                found[name].append(result)
    return found


def seconds_per_call(call: Callable[[], object], clock: Clock, *, calls: int, settle: int = 1) -> float:
    """Median seconds of `calls` consecutive calls, after `settle` calls that bring caches to what a loop of them would find."""
    for _ in range(settle):
        call()
    taken = []
    for _ in range(calls):
        began = clock()
        call()
        taken.append(clock() - began)
    return statistics.median(taken)
