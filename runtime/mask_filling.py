"""The bitmasks of constrained requests, filled by threads beside the steps: what one of them takes long for, the others do not wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import NamedTuple

from .bitmasks import filled
from .constraint import TOO_COMPLEX, Bitmask, ConstraintError
from .scheduler.scheduled_step import ScheduledRequest
from .scheduler.state import SchedulerState

THREADS = 32
"""Requests whose bitmasks are filled at once; a thread is started when all others are busy."""

SHARE_S = 0.005
"""How long a step waits for a bitmask, which most take a hundredth of. Its request sits out the steps that begin later."""

BURST_S, MASK_S = 1.0, 0.025
"""Time of a processor that the bitmasks of a request may take, and more of it for each."""

IDLE_S = 0.05
"""How long the stepping thread waits for bitmasks, where nothing else can run, before it looks at what has arrived."""


class _Fill(NamedTuple):
    row: ScheduledRequest
    until_s: float
    mask: Future[Bitmask]


class MaskFilling:
    """Fills the bitmasks of the next decode step. For the stepping thread.

    Args:
        words: of a bitmask.
        cpu_s: seconds that the calling thread has had of a processor.
    """

    def __init__(self, words: int, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._words, self._cpu_s = words, cpu_s
        self._threads: ThreadPoolExecutor | None = None
        self._fills: dict[str, _Fill] = {}
        # By request id, as `_fills`; the only item of each is written by the thread that fills.
        self._left_s: dict[str, list[float]] = {}

    def hold(self, state: SchedulerState) -> SchedulerState:
        """The state with the requests that have to sit out the next step, whose bitmasks are not filled yet."""
        begun = [
            (request.arrival, self._begun(ScheduledRequest(request, request.num_pages, 1 + state.policy.drafts(request))))
            for group in state.groups
            for request in group.running
            if request.request.constraint is not None and request.decoding and request.settled
        ]
        for _, fill in begun:
            if not fill.mask.done():
                wait([fill.mask], max(0.0, fill.until_s - time.monotonic()))
        unready = frozenset(arrival for arrival, fill in begun if not fill.mask.done())
        return state if unready == state.unready else replace(state, unready=unready)

    def wait(self) -> None:
        """Waits until a bitmask is filled, or for a moment."""
        wait([fill.mask for fill in self._fills.values() if not fill.mask.done()], IDLE_S, FIRST_COMPLETED)

    def take(self, row: ScheduledRequest) -> Bitmask:
        """The bitmask of a row: [at least one for each token that it samples, words].

        Raises:
            ConstraintError: its request cannot go on.
        """
        fill = self._fills.get(row.request.id)
        if fill is not None:
            # One that was preempted since is prefilled, and samples a token less; its constraint is not asked by two threads at once.
            mask = fill.mask.result()
            if _same(fill.row, row):
                return mask
        return filled(row, self._words)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._fills.pop(request_id, None)
        self._left_s.pop(request_id, None)

    def _begun(self, row: ScheduledRequest) -> _Fill:
        fill = self._fills.get(row.request.id)
        if fill is None or not _same(fill.row, row):
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, "npucompile-masks")
            mask = self._threads.submit(self._fill, row, self._left_s.setdefault(row.request.id, [BURST_S]))
            fill = self._fills[row.request.id] = _Fill(row, time.monotonic() + SHARE_S, mask)
        return fill

    def _fill(self, row: ScheduledRequest, left_s: list[float]) -> Bitmask:
        began_s = self._cpu_s()
        mask = filled(row, self._words)
        left_s[0] = min(left_s[0] + len(mask) * MASK_S - (self._cpu_s() - began_s), BURST_S)
        if left_s[0] < 0:
            why = f"its masks take more than {BURST_S:g} s of a processor and {MASK_S:g} s for each; legal is a less ambiguous grammar"
            raise ConstraintError(f"the output cannot go on under its constraint: {why}", row.request.id, TOO_COMPLEX)
        return mask


def _same(filled_row: ScheduledRequest, row: ScheduledRequest) -> bool:
    """Whether what may follow is the same, for as many tokens as the second row samples."""
    before, now = filled_row.state, row.state
    same = before.arrival == now.arrival and before.num_tokens == now.num_tokens and row.num_drafts <= filled_row.num_drafts
    return same and before.drafts[: row.num_drafts] == now.drafts[: row.num_drafts]
