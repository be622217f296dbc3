"""Owns the pages and slots of one dp group: allocates what a scheduled step needs, and packs its rows with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...graphs.types import Bucket, Limits
from ..adjustments import Adjustment
from ..buckets import Arrays, DecodeRow, PrefillRow, Row, pack
from ..constraint import Bitmask
from ..rng import random_number
from .pools import OwnershipError, PagePool, RequestSlotPool, StateSlotPool
from .schedule import GroupState, GroupStep, ScheduledRequest


class KVCacheManager:
    """The pools of one dp group; the same number means another page or slot in another group.

    Steps run on the device in the order in which they are launched. So the pages and slots of a request may be given to another one as
    soon as it ends: a step still in flight writes to them before any step of the new owner does.

    Args:
        limits: of the pools.
        max_logprobs: as for `buckets.pack`.
    """

    def __init__(self, limits: Limits, max_logprobs: int = 0) -> None:
        self.limits = limits
        self.pages = PagePool(limits.num_pages)
        self.state_slots = StateSlotPool(limits.num_slots, limits.slots_per_request)
        self.request_slots = RequestSlotPool(limits.num_request_slots)
        self._max_logprobs = max_logprobs

    def inputs(
        self,
        bucket: Bucket,
        step: GroupStep,
        bitmasks: Mapping[str, Bitmask] | None = None,
        adjustments: Mapping[str, Adjustment] | None = None,
    ) -> Arrays:
        """Applies the group's preemptions, admissions and page growth, and returns the packed inputs of its rows.

        Args:
            bitmasks: of restricted requests, by id.
            adjustments: of logits, by request id.

        Raises:
            OwnershipError: when the pools cannot give what was scheduled.
        """
        for request_id in step.preempted:
            self.release(request_id)
        for request_id in step.admitted:
            self.state_slots.allocate_group(request_id)
            self.request_slots.allocate_group(request_id)
        make: Callable[[ScheduledRequest], Row] = self._decode_row if bucket.kind == "decode" else self._prefill_row
        masks, changes = bitmasks or {}, adjustments or {}
        rows = [make(row) for row in step.rows]
        if masks or changes:
            ids = [row.request.id for row in step.rows]
            rows = [row._replace(bitmask=masks.get(id), adjustment=changes.get(id)) for row, id in zip(rows, ids, strict=True)]
        return pack(bucket, rows, self.limits, max_logprobs=self._max_logprobs)

    def release(self, request_id: str) -> None:
        """Frees all pages and slots of a request; one that owns nothing here changes nothing."""
        self.pages.free(request_id)
        self.state_slots.free(request_id)
        self.request_slots.free(request_id)

    def check(self, group: GroupState) -> None:
        """Compares owners and free counts of the pools with the scheduler's running requests.

        Raises:
            OwnershipError: on a leak, a double owner, or a count that differs.
        """
        running = frozenset(request.id for request in group.running)
        free_request_slots = self.limits.num_request_slots - 1 - len(running)
        for pool, free in (
            (self.pages, group.free_pages(self.limits)),
            (self.state_slots, group.free_slots(self.limits)),
            (self.request_slots, free_request_slots),
        ):
            pool.check()
            if pool.owners() != running or pool.free_count != free:
                raise OwnershipError(
                    f"the pool has {pool.free_count} free and owners {sorted(pool.owners())}; "
                    f"the scheduler has {free} free and running requests {sorted(running)}"
                )

    def _prefill_row(self, row: ScheduledRequest) -> PrefillRow:
        request, sampling = row.request, row.request.sampling
        return PrefillRow(
            tokens=row.token_ids,
            start=row.start,
            pages=self._grow(row),
            slot=self.state_slots.owned(request.id)[0],
            request_slot=self.request_slots.owned(request.id)[0],
            next_token=row.next_token,
            sampling=sampling,
            uniform=_random_number(row, 0) if sampling.temperature else 0.0,
            logprobs=request.logprobs is not None,
        )

    def _decode_row(self, row: ScheduledRequest) -> DecodeRow:
        request, sampling = row.request, row.request.sampling
        return DecodeRow(
            request_slot=self.request_slots.owned(request.id)[0],
            base=row.start,
            pages=self._grow(row),
            slots=self.state_slots.owned(request.id),
            drafts=row.num_drafts,
            sampling=sampling,
            uniforms=[_random_number(row, i) for i in range(2 * self.limits.drafts + 1)] if sampling.temperature else (),
            logprobs=request.logprobs is not None,
        )

    def _grow(self, row: ScheduledRequest) -> Sequence[int]:
        """The request's pages, after allocating those that the row lacks."""
        pages = self.pages.owned(row.request.id)
        if len(pages) >= row.num_pages:
            return pages
        self.pages.allocate(row.num_pages - len(pages), row.request.id)
        return self.pages.owned(row.request.id)


def _random_number(row: ScheduledRequest, i: int) -> float:
    """The number that picks the row's i-th sampled token."""
    return random_number(row.request.sampling.seed or 0, row.output_index + i)
