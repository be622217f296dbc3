"""Turns the planned step of one dp group into packed inputs, with the pages, slots and seats its requests own."""

from __future__ import annotations

from collections.abc import Sequence

from ...graphs.types import Bucket, Limits
from ..buckets import Arrays, DecodeRow, PrefillRow, Row, pack
from ..rng import uniform
from .pools import OwnershipError, PagePool, SeatPool, SlotPool
from .schedule import State, Step, Turn


class Holdings:
    """Who owns which pages, slots and seats in the pools of one dp group; the numbers of groups have nothing to do with each other.

    Steps run on the device in the order in which they are launched, so what a request held may go to another as soon as it ends: a step
    still in flight writes there before any step of the new owner does.

    Args:
        limits: of the pools.
        max_logprobs: as for `buckets.pack`.
    """

    def __init__(self, limits: Limits, max_logprobs: int = 0) -> None:
        self.limits = limits
        self.pages = PagePool(limits.num_pages)
        self.slots = SlotPool(limits.num_slots, limits.slots_per_request)
        self.seats = SeatPool(limits.num_seats)
        self._max_logprobs = max_logprobs

    def inputs(self, bucket: Bucket, step: Step | None) -> Arrays:
        """Does what a step says about ownership, and packs its rows; without a step all rows are padding.

        Raises:
            OwnershipError: when the pools cannot give what was planned.
        """
        rows: list[Row] = []
        if step is not None:
            for request_id in step.preempted:
                self.release(request_id)
            if step.admitted is not None:
                self.slots.allocate_group(step.admitted)
                self.seats.allocate_group(step.admitted)
            rows = [self._decode_row(turn) if bucket.kind == "decode" else self._prefill_row(turn) for turn in step.turns]
        return pack(bucket, rows, self.limits, max_logprobs=self._max_logprobs)

    def release(self, request_id: str) -> None:
        """Takes back all that a request holds."""
        self.pages.free(request_id)
        self.slots.free(request_id)
        self.seats.free(request_id)

    def check(self, state: State) -> None:
        """Compares the pools with the live requests, number by number.

        Raises:
            OwnershipError: on a leak, a double owner, or counts other than the scheduler's.
        """
        running = frozenset(live.id for live in state.running)
        free_seats = self.limits.num_seats - 1 - len(running)
        for pool, free in ((self.pages, state.free_pages), (self.slots, state.free_slots), (self.seats, free_seats)):
            pool.check()
            if pool.owners() != running or pool.free_count != free:
                raise OwnershipError(
                    f"the pool has {pool.free_count} free and owners {sorted(pool.owners())}; "
                    f"the scheduler has {free} free and running requests {sorted(running)}"
                )

    def _prefill_row(self, turn: Turn) -> PrefillRow:
        request, sampling = turn.request, turn.request.sampling
        return PrefillRow(
            tokens=turn.tokens,
            start=turn.start,
            pages=self._grown(turn),
            slot=self.slots.owned(request.id)[0],
            seat=self.seats.owned(request.id)[0],
            next_token=turn.next_token,
            sampling=sampling,
            uniform=self._uniform(turn, 0) if sampling.temperature else 0.0,
            logprobs=request.logprobs is not None,
        )

    def _decode_row(self, turn: Turn) -> DecodeRow:
        request, sampling = turn.request, turn.request.sampling
        return DecodeRow(
            seat=self.seats.owned(request.id)[0],
            base=turn.start,
            pages=self._grown(turn),
            slots=self.slots.owned(request.id),
            drafts=turn.drafts,
            sampling=sampling,
            uniforms=[self._uniform(turn, i) for i in range(2 * self.limits.drafts + 1)] if sampling.temperature else (),
            logprobs=request.logprobs is not None,
        )

    def _grown(self, turn: Turn) -> Sequence[int]:
        """The request's pages, once there are as many as the turn says."""
        held = self.pages.owned(turn.request.id)
        if len(held) >= turn.pages:
            return held
        self.pages.allocate(turn.pages - len(held), turn.request.id)
        return self.pages.owned(turn.request.id)

    @staticmethod
    def _uniform(turn: Turn, i: int) -> float:
        return uniform(turn.request.sampling.seed or 0, turn.sample_index + i)
