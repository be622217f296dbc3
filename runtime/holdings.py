"""Turns the planned step of one dp group into packed inputs, with the pages and slots its requests own."""

from __future__ import annotations

from ..graphs.types import Bucket, Limits
from .buckets import Arrays, Row, pack
from .pages import OwnershipError, PagePool, SlotPool
from .scheduler import State, Step, Turn
from .uniform import uniform


class Holdings:
    """Who owns which pages and slots in the pools of one dp group; page and slot numbers of groups have nothing to do with each other."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pages = PagePool(limits.num_pages)
        self.slots = SlotPool(limits.num_slots, limits.slots_per_request)

    def inputs(self, bucket: Bucket, step: Step | None) -> Arrays:
        """Does what a step says about ownership, and packs its rows; without a step all rows are padding.

        Raises:
            OwnershipError: when the pools cannot give what was planned.
        """
        if step is None:
            return pack(bucket, (), self.limits)
        for request_id in step.preempted:
            self.release(request_id)
        if step.admitted is not None:
            self.slots.allocate_group(step.admitted)
        return pack(step.bucket, [self._row(turn) for turn in step.turns], self.limits)

    def release(self, request_id: str) -> None:
        """Takes back all that a request holds."""
        self.pages.free(request_id)
        self.slots.free(request_id)

    def check(self, state: State) -> None:
        """Compares the pools with the live requests, number by number.

        Raises:
            OwnershipError: on a leak, a double owner, or counts other than the scheduler's.
        """
        self.pages.check()
        self.slots.check()
        running = frozenset(live.id for live in state.running)
        for pool, free in ((self.pages, state.free_pages), (self.slots, state.free_slots)):
            if pool.owners() != running or pool.free_count != free:
                raise OwnershipError(
                    f"the pool has {pool.free_count} free and owners {sorted(pool.owners())}; "
                    f"the scheduler has {free} free and running requests {sorted(running)}"
                )

    def _row(self, turn: Turn) -> Row:
        request_id, sampling = turn.request.id, turn.request.sampling
        held = self.pages.owned(request_id)
        if len(held) < turn.pages:
            self.pages.allocate(turn.pages - len(held), request_id)
            held = self.pages.owned(request_id)
        group = self.slots.owned(request_id)
        width = len(turn.write_indices) if sampling.temperature else 0
        return Row(
            tokens=turn.tokens,
            start=turn.start,
            pages=held,
            read_slot=group[turn.read_index],
            write_slots=[group[i] for i in turn.write_indices],
            sampling=sampling,
            uniforms=[uniform(sampling.seed or 0, turn.sample_index + i) for i in range(width)],
        )
