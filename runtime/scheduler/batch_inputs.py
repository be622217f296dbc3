"""The packed inputs of a decode batch, of which each step changes only what differs from the one before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ...graphs.types import Bucket
from ..buckets import Arrays
from ..rng import mixed_seeds, random_numbers
from .scheduled_step import DecodeRows


class BatchInputs:
    """Packs one step of a batch after the other. What a step got is never changed: an array that changes is a new one.

    Attributes:
        members: of the batch.

    Args:
        bucket: that the steps run in.
        rows: of the first of them.
        arrays: inputs of that step, as `buckets.pack` returns them.
    """

    def __init__(self, bucket: Bucket, rows: DecodeRows, arrays: Arrays) -> None:
        self._bucket, self.members, self._arrays = bucket, rows.batch.members, arrays
        samplings = [state.request.sampling for state in self.members.states]
        self._sampled = np.array([i for i, sampling in enumerate(samplings) if sampling.temperature], np.int64)
        self._seeds = mixed_seeds([samplings[i].seed or 0 for i in self._sampled.tolist()])

    def are_of(self, bucket: Bucket, rows: DecodeRows) -> bool:
        """Whether they are of these rows, which run in this bucket."""
        return self.members is rows.batch.members and self._bucket == bucket

    def next(self, rows: DecodeRows, tables: Iterable[tuple[int, Sequence[int]]]) -> Arrays:
        """The inputs of the next step.

        Args:
            rows: of the step.
            tables: number of the row and its pages, of each row whose pages are not what they were in the step before.
        """
        start = rows.base
        changed = {"base": _with_rows(self._arrays["base"], start)}
        if len(self._sampled):
            # Of the tokens behind `start`, which is the position of the last one that is known for certain.
            first = (start - self.members.prompts + 1)[self._sampled]
            uniform = np.zeros_like(self._arrays["uniform"])
            uniform[self._sampled] = random_numbers(self._seeds, first, uniform.shape[1])
            changed["uniform"] = uniform
        page_table = None
        for i, pages in tables:
            if page_table is None:
                page_table = changed["page_table"] = self._arrays["page_table"].copy()
            page_table[i, : len(pages)] = pages
        self._arrays = {**self._arrays, **changed}
        return self._arrays


def _with_rows(array: npt.NDArray[np.int32], values: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    new = np.zeros_like(array)
    new[: len(values)] = values
    return new
