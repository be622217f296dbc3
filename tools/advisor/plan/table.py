"""The table of decode step times over batch and context that a simulation reads."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .decode import decode_seconds
from .parameters import PlanParameters
from .products import Array
from .system import System

POINTS = 6
"""Contexts of the table; times between them are interpolated."""

Decode = Callable[[Array, Array], Array]
"""Seconds of a decode step by rows of a group and mean context, which broadcast."""


class _LazyTimes(dict[int, list[float]]):
    """Times by number, computed when they are first wanted."""

    def __init__(self, times: Callable[[int], list[float]]) -> None:
        super().__init__()
        self._times = times

    def __missing__(self, number: int) -> list[float]:
        self[number] = self._times(number)
        return self[number]


_Rows = list[list[float]] | _LazyTimes


class StepTable:
    """Seconds of a decode step of each bucket, linear between `POINTS` contexts.

    Args:
        buckets: rows of a group that a step may have, increasing.
        shortest, longest: contexts between which it is asked.
        seconds: the time of a step.
        lazily: it is asked for each number of rows when that is first wanted, as what reads graphs takes a second.
    """

    def __init__(self, buckets: Sequence[int], shortest: float, longest: float, seconds: Decode, *, lazily: bool = False) -> None:
        self.buckets = tuple(buckets)
        self.shortest = shortest
        self.width = max(longest - shortest, 1.0) / (POINTS - 1)
        contexts: Array = shortest + self.width * np.arange(POINTS, dtype=np.float64)
        rows = np.asarray(self.buckets, dtype=float)
        self._rows: _Rows = [] if not lazily else _LazyTimes(lambda i: seconds(rows[i : i + 1, None], contexts[None, :])[0].tolist())
        self._most: _Rows = _LazyTimes(lambda i: [max(times) for times in zip(*(self._rows[row] for row in range(i + 1)), strict=True)])
        if not lazily:
            times = seconds(rows[:, None], contexts[None, :])
            self._rows, self._most = times.tolist(), np.maximum.accumulate(times, axis=0).tolist()
        self._index = [bisect.bisect_left(self.buckets, batch) for batch in range(self.buckets[-1] + 1)]

    def bucket(self, batch: int) -> int:
        """The smallest bucket that holds so many rows; the largest where none does."""
        return self.buckets[self._index[batch] if batch < len(self._index) else -1]

    def seconds(self, batch: int, context: float) -> float:
        """Of a step with so many live rows in the largest group."""
        return self._between(self._rows, batch, context)

    def most_seconds(self, batch: int, context: float) -> float:
        """Of a step with up to so many live rows in the largest group."""
        return self._between(self._most, batch, context)

    def _between(self, times: _Rows, batch: int, context: float) -> float:
        row = times[self._index[batch] if batch < len(self._index) else len(self.buckets) - 1]
        place = (context - self.shortest) / self.width
        left = min(max(int(place), 0), POINTS - 2)
        return row[left] + (row[left + 1] - row[left]) * (place - left)


def step_table(system: System, parameters: PlanParameters, most: int, shortest: float, longest: float) -> StepTable:
    """The table of a system whose groups have up to `most` requests.

    Beyond the largest bucket a step runs with the rows that it has, as the published engines do without a captured graph.
    """
    buckets = [bucket for bucket in system.buckets if bucket < most]
    above = next((bucket for bucket in system.buckets if bucket >= most), most)
    every = [*buckets, above] if system.buckets else list(range(1, most + 1))

    return StepTable(every, shortest, longest, partial(decode_seconds, system, parameters))
