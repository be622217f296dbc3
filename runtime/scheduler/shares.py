"""What running requests have of the pools of their dp group, one by one and as a batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..buckets import Arrays
from .batch_inputs import BatchInputs
from .computed import Computed, ComputedBatch
from .prefix_blocks import Checkpoint
from .scheduled_step import DecodeRows


@dataclass(slots=True)
class Share:
    """What a running request has.

    Attributes:
        table: its pages in order of position: those of its path in the prefix index, and then its own.
        flushes: of the index when it was admitted.
        source: the state that its next chunk starts from, if that is not in its own slot.
        written: states that steps in flight write, by tokens computed.
        num_kept: tokens of its prompt that it was the first to have in the prefix index.
        in_flight: its steps that are launched and whose results are not known.
        last: what its last step computed, as long as no later one is launched, which writes over its states.
    """

    table: array[int] = field(default_factory=lambda: array("i"))
    flushes: int = 0
    source: Checkpoint | None = None
    written: dict[int, Checkpoint] = field(default_factory=dict)
    num_kept: int = 0
    in_flight: int = 0
    last: Computed | None = None


class BatchShares:
    """The shares of a decode batch. What every step changes of all of them is put off until somebody looks at one (`settle`).

    Args:
        inputs: of the batch.
        shares: of each row.
        depths: full pages of each row that the prefix index has.

    Attributes:
        full_pages: up to how many pages of each row nothing is to be kept any more.
    """

    def __init__(self, inputs: BatchInputs, shares: Sequence[Share], depths: Sequence[int]) -> None:
        self.inputs, self.shares, self.full_pages = inputs, shares, np.array(depths, np.int64)
        self._changed: set[int] = set()
        self._in_flight = 0
        self._computed: ComputedBatch | None = None

    def table_changes(self, row: int) -> None:
        """A row has other pages than in the step before."""
        self._changed.add(row)

    def launch(self, rows: DecodeRows) -> Arrays:
        """The inputs of the next step, which is about to be launched."""
        tables = [(i, self.shares[i].table) for i in self._changed]
        self._changed.clear()
        self._in_flight, self._computed = self._in_flight + 1, None
        return self.inputs.next(rows, tables)

    def computed(self, rows: ComputedBatch) -> None:
        """The results of a step are known."""
        self._in_flight, self._computed = self._in_flight - 1, rows

    def settle(self) -> None:
        """Brings every share up to date."""
        for i, share in enumerate(self.shares):
            share.in_flight += self._in_flight
            share.last = self._computed[i] if self._computed is not None and not share.in_flight else None
