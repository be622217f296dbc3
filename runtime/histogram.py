"""Histograms with fixed buckets, as Prometheus counts them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class HistogramSnapshot(NamedTuple):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds of the buckets, ascending; the last is infinity.
        counts: observations up to and including each bound.
        total: sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts observations by size.

    Args:
        bounds: finite upper bounds, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramSnapshot:
        """A copy."""
        return HistogramSnapshot((*self._bounds, math.inf), tuple(accumulate(self._counts)), self._total)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`: the bounds that vLLM gives to numbers of tokens."""
    bounds = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)
