"""Owns the pages and slots of one dp group: allocates what a scheduled step needs, packs its rows with them, and keeps prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...graphs.steps.kind import SegmentSizes
from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket, Limits
from ..adjustments import Adjustment
from ..constraint import Bitmask
from ..request import ParkedEvent, Request
from ..rng import random_number
from ..steps.decode_table import DecodeTable
from ..steps.pack import Arrays, pack
from ..steps.rows import PrefillRow, SegmentRow
from .picture_ledger import PictureLedger
from .pools import Keeper, OwnershipError, PagePool, RequestSlotPool, StateSlotPool
from .prefix_blocks import Checkpoint
from .prefix_check import check_prefixes
from .prefix_index import PrefixIndex
from .request_state import ComputedTokens, RequestState
from .scheduled_step import GroupStep, Reservation, ScheduledRequest
from .share import Share
from .state import GroupState


@dataclass(frozen=True)
class PrefixCacheSettings:
    """How prefixes are kept (`prefix_index.py`).

    Attributes:
        most_tokens: most tokens of prefixes that no running request uses; None for as many as the pages that requests leave.
    """

    most_tokens: int | None = None


NOT_ENCODED = "the vision tower returned what is no finite number"


class KVCacheManager:
    """The pools of one dp group; the same number means another page or slot in another group.

    Steps run on the device in the order in which they are launched. So the pages and slots of a request may be given to another one as
    soon as it ends: a step still in flight writes to them before any step of the new owner does. The same holds for what a step reads.

    Args:
        limits: of the pools.
        max_logprobs: as for `steps.pack.pack`.
        prefix_cache: how prefixes are kept; None keeps none.
        recurrent: whether the model has recurrent states.
        segments: as for `steps.pack.pack`.

    Attributes:
        prefixes: what is in the caches, where prefixes are kept.
        pictures: who has which rows of pictures, where the graphs take any.
    """

    def __init__(
        self,
        limits: Limits,
        max_logprobs: int = 0,
        prefix_cache: PrefixCacheSettings | None = None,
        *,
        recurrent: bool = False,
        segments: SegmentSizes | None = None,
    ) -> None:
        self.limits, self._segments = limits, segments
        self.pictures = PictureLedger(limits.picture_rows, drafts=limits.drafts > 0) if limits.picture_rows else None
        self.pages = PagePool(limits.num_pages)
        self.state_slots = StateSlotPool(limits.num_slots, limits.slots_per_request)
        self.request_slots = RequestSlotPool(limits.num_request_slots)
        self.prefixes: PrefixIndex | None = None
        if prefix_cache is not None:
            most = prefix_cache.most_tokens
            self.prefixes = PrefixIndex(
                limits.page_size,
                drafts=limits.drafts > 0,
                recurrent=recurrent,
                free_page=lambda page: self.pages.free_number(page, Keeper.PREFIXES),
                free_slot=lambda slot: self.state_slots.free_number(slot, Keeper.PREFIXES),
                most_pages=None if most is None else most // limits.page_size,
            )
        self._max_logprobs, self._decoding = max_logprobs, DecodeTable(limits, max_logprobs)
        self._shares: dict[str, Share] = {}

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
        masks, changes = bitmasks or {}, adjustments or {}
        for request_id in step.preempted:
            self.release(request_id)
        self._admit(step)
        kind = kind_of(bucket)
        if not kind.samples:
            return self._encode(bucket, step)
        if kind.decodes:
            return self._decode(bucket, step, masks, changes)
        # What a row starts from stays until all rows have what they write.
        read = [share.source for row in step.rows if (share := self._shares[row.request.id]).source]
        rows = [self._prefill_row(row) for row in step.rows]
        for row in step.rows:
            share = self._shares[row.request.id]
            share.in_flight, share.last = share.in_flight + 1, None
        if masks or changes:
            ids = [row.request.id for row in step.rows]
            rows = [row._replace(bitmask=masks.get(id), adjustment=changes.get(id)) for row, id in zip(rows, ids, strict=True)]
        for checkpoint in read:
            self._drop(checkpoint)
        return pack(bucket, rows, self.limits, max_logprobs=self._max_logprobs)

    def encoded(self, step: GroupStep, finite: Sequence[bool]) -> dict[str, str]:
        """An encode step has ended. Returns the ids of the requests that read a picture whose rows are not finite, or were going to, and
        why they fail; the rows are forgotten.

        Args:
            finite: of each of its segments.
        """
        if self.pictures is None:
            return {}
        failures = self.pictures.finished(step.pictures, finite)
        return {owner: f"picture {key[0].hex()[:16]} of the prompt: {NOT_ENCODED}" for key, owners in failures for owner in owners}

    def reserve(self, reserved: Sequence[Reservation]) -> None:
        """Gives requests the pages and slots that handovers fill.

        Raises:
            OwnershipError: when the pools cannot give what was scheduled.
        """
        for request, match in reserved:
            share = self._shares[request.id] = Share()
            if self.prefixes is not None:
                share.flushes = self.prefixes.flushes
                self.prefixes.enter(request.id, match)
                share.table.extend(block.page for block in match.blocks)
        for request, _ in reserved:
            self._take_slots(request.request)
            self._grow(self._shares[request.id], request.id, request.num_pages)

    def parked(self, request: RequestState, group: int) -> ParkedEvent:
        """Where a handover finds what is computed of a parked request, or puts it."""
        count = -(-(request.num_tokens - 1) // self.limits.page_size)
        known = 0 if request.num_computed_tokens == request.num_tokens - 1 else request.num_computed_tokens // self.limits.page_size
        pages = tuple(self._shares[request.id].table[:count])
        tokens = request.token_ids(0, request.num_tokens)
        return ParkedEvent(request.id, group, pages, self.state_slot(request.id), known, tokens)

    def request_slot(self, request_id: str) -> int:
        """The request slot of a running request."""
        return self.request_slots.owned(request_id)[0]

    def state_slot(self, request_id: str) -> int:
        """The first state slot of a running request."""
        return self.state_slots.owned(request_id)[0]

    def computed(self, rows: Sequence[ComputedTokens]) -> None:
        """Keeps what rows have computed, once that is known; before their requests are released."""
        if self.prefixes is None:
            return
        for row in rows:
            share = self._shares.get(row.request.id)
            if share is None:
                continue
            share.in_flight -= 1
            if row.not_finite:
                self.prefixes.forget(row.request.id)
            elif share.flushes == self.prefixes.flushes:
                self._keep_pages(self.prefixes, share, row)
            if share.written:
                self._keep_states(self.prefixes, share, row)
            share.last = row if not share.in_flight and not row.not_finite else None

    def release(self, request_id: str) -> None:
        """Frees all pages and slots of a request, but for those that are kept; one that owns nothing here changes nothing."""
        share = self._shares.pop(request_id, None)
        if share is not None and self.prefixes is not None:
            for checkpoint in (share.source, *share.written.values()):
                self._drop(checkpoint)
            if self.prefixes.recurrent and share.last is not None:
                self._keep_end(self.prefixes, share, share.last)
            self.prefixes.leave(request_id)
        self.pages.free(request_id)
        self.state_slots.free(request_id)
        self.request_slots.free(request_id)
        if self.pictures is not None:
            self.pictures.leave(request_id)

    def num_kept(self, request_id: str) -> int:
        """Tokens of a running request's prompt that are kept and were not before it; 0 where nothing is known of it."""
        share = self._shares.get(request_id)
        return share.num_kept if share is not None else 0

    def flush(self) -> None:
        """Forgets all prefixes, and pictures that nobody needs; pages and slots that requests use are free when they end."""
        if self.prefixes is not None:
            self.prefixes.flush()
        if self.pictures is not None:
            self.pictures.flush()

    def take_unused(self) -> dict[str, tuple[int, ...]]:
        """Pages and state slots, by the axis of their pools, that were free ever since the last call (`Pool.take_unused`)."""
        return {"pages": self.pages.take_unused(), "slots": self.state_slots.take_unused()}

    def check(self, group: GroupState) -> None:
        """Compares owners and free counts of the pools with the scheduler's running requests.

        Raises:
            OwnershipError: on a leak, a double owner, or a count that differs.
        """
        if self.prefixes is not None:
            check_prefixes(self.prefixes, self._shares, self.pages, self.state_slots)
        running = frozenset(request.id for request in group.running)
        if self.pictures is not None:
            self.pictures.check(running)
        unused_pages = self.prefixes.num_unused if self.prefixes else 0
        unused_slots = self.prefixes.num_checkpoints - self.prefixes.num_held if self.prefixes else 0
        for pool, evictable, free in (
            (self.pages, unused_pages, group.free_pages(self.limits)),
            (self.state_slots, unused_slots, group.free_slots(self.limits)),
            (self.request_slots, 0, self.limits.num_request_slots - 1 - len(running)),
        ):
            pool.check()
            owners = pool.owners() - {Keeper.PREFIXES}
            # A request whose pages are all shared owns none of its own.
            expected = frozenset(name for name in running if pool is not self.pages or self._owns_pages(name))
            if owners != expected or pool.free_count + evictable != free:
                raise OwnershipError(
                    f"the pool has {pool.free_count + evictable} free and owners {sorted(map(str, owners))}; "
                    f"the scheduler has {free} free and running requests {sorted(expected)}"
                )

    def _owns_pages(self, request_id: str) -> bool:
        share = self._shares.get(request_id)
        return share is None or self.prefixes is None or len(share.table) > len(self.prefixes.path(request_id))

    def _admit(self, step: GroupStep) -> None:
        """Gives those that are admitted their slots, and the pages and the state that they start after."""
        admitted = [row for row in step.rows if row.request.id in step.admitted]
        for row in admitted:
            share = self._shares[row.request.id] = Share()
            if self.prefixes is not None and row.match is not None:
                share.flushes, share.source = self.prefixes.flushes, row.match.checkpoint
                if share.source:
                    self.prefixes.hold(share.source)
                self.prefixes.enter(row.request.id, row.match)
                share.table.extend(block.page for block in row.match.blocks[: row.match.depth])
                if row.match.tail is not None:
                    self.pages.transfer(row.match.tail.page, Keeper.PREFIXES, row.request.id)
                    share.table.append(row.match.tail.page)
        if self.pictures is not None:
            self.pictures.enter([(row.request, row.start) for row in admitted])
        # Only now is what none of them needs known, and may be evicted.
        for row in admitted:
            self._take_slots(row.request)

    def _take_slots(self, request: Request) -> None:
        """Gives a request its slots; its share has the pages that are known."""
        self._make_room(self.state_slots.group)
        own, share = self.state_slots.allocate_group(request.id), self._shares[request.id]
        (share.slot,) = self.request_slots.allocate_group(request.id)
        self._decoding.begin(share.slot, request, own, share.table)

    def _encode(self, bucket: Bucket, step: GroupStep) -> Arrays:
        """The inputs of an encode step; those that it admits get their pages."""
        for row in step.rows:
            self._grow(self._shares[row.request.id], row.request.id, row.num_pages)
        rows = self.pictures.launched(step.pictures) if self.pictures is not None else []
        segments = [SegmentRow(picture, own) for picture, own in zip(step.pictures, rows, strict=True)]
        return pack(bucket, segments, self.limits, segments=self._segments)

    def _prefill_row(self, row: ScheduledRequest) -> PrefillRow:
        request, sampling, share = row.request, row.request.sampling, self._shares[row.request.id]
        own = self.state_slots.owned(request.id)[0]
        start = share.source.slot if share.source else own
        # The last chunk writes to the slot that decode steps know.
        share.source = self._new_checkpoint(share, row.start + row.num_tokens) if row.checkpoint else None
        return PrefillRow(
            tokens=row.token_ids,
            start=row.start,
            pages=self._grow(share, request.id, row.num_pages),
            slot=share.source.slot if share.source else own,
            request_slot=share.slot,
            next_token=row.next_token,
            sampling=sampling,
            uniform=random_number(sampling.seed or 0, row.output_index) if sampling.temperature else 0.0,
            logprobs=row.logprobs is not None,
            start_slot=start,
            places=self.pictures.places(request, row.start, row.num_tokens) if self.pictures is not None else None,
        )

    def _decode(self, bucket: Bucket, step: GroupStep, masks: Mapping[str, Bitmask], changes: Mapping[str, Adjustment]) -> Arrays:
        """The inputs of a decode step. A row costs what it has that was not there in the step before."""
        slots, base, drafts, shares = list[int](), list[int](), list[int](), self._shares
        for request, num_pages, num_tokens, _, _ in step.rows:
            share = shares[request.request.id]
            if num_pages > len(share.table):
                self._grow(share, request.id, num_pages)
            share.in_flight, share.last = share.in_flight + 1, None
            slots.append(share.slot)
            base.append(request.num_computed_tokens + request.steps_in_flight)
            drafts.append(num_tokens - 1)
        tables = {
            name: [(i, items[row.request.id]) for i, row in enumerate(step.rows) if row.request.id in items] if items else ()
            for name, items in (("bitmask", masks), ("adjustment", changes))
        }
        inputs = self._decoding.inputs(bucket, slots, base, drafts, tables)
        for i, row in enumerate(step.rows) if "logprobs" in inputs else ():
            if not row.state.request.plain:
                # While tokens of the prompt are scored it may want others than behind it.
                inputs["logprobs"][i] = row.logprobs is not None
        return inputs

    def _grow(self, share: Share, request_id: str, num_pages: int) -> Sequence[int]:
        """The request's pages, after allocating those that it lacks of so many."""
        lacking = num_pages - len(share.table)
        if lacking > 0:
            if self.prefixes is not None and lacking > self.pages.free_count:
                self.prefixes.evict(lacking - self.pages.free_count)
            new = self.pages.allocate(lacking, request_id)
            self._decoding.add(share.slot, len(share.table), new)
            share.table.extend(new)
        return share.table

    def _make_room(self, count: int) -> None:
        """Evicts checkpoints until so many state slots are free, or none is left to evict."""
        while self.prefixes is not None and self.state_slots.free_count < count and self.prefixes.evict_checkpoint():
            pass

    def _new_checkpoint(self, share: Share, num_tokens: int) -> Checkpoint:
        """A slot for the state after so many tokens; a step is about to write it, and the next one to read it."""
        assert self.prefixes is not None
        self._make_room(1)
        (slot,) = self.state_slots.allocate(1, Keeper.PREFIXES)
        checkpoint = share.written[num_tokens] = self.prefixes.new_checkpoint(slot)
        self.prefixes.hold(checkpoint)
        self.prefixes.hold(checkpoint)
        return checkpoint

    def _drop(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None and self.prefixes is not None:
            self.prefixes.drop(checkpoint)

    def _keep_pages(self, prefixes: PrefixIndex, share: Share, row: ComputedTokens) -> None:
        """Gives the pages that are full, and whose tokens are known, to the index, or takes its own where it has them already."""
        owner, page_size = row.request.id, self.limits.page_size
        kept = len(prefixes.path(owner))
        if row.num_computed_tokens < (kept + 1) * page_size:
            return
        full = min(row.num_computed_tokens, row.num_tokens - prefixes.drafts) // page_size
        for place in range(kept, full):
            tokens = row.key_ids(place * page_size, page_size + 1)
            block = prefixes.extend(owner, prefixes.edge(row.request.request.cache_salt if not place else None, tokens), share.table[place])
            if block is None:
                return
            if block.page == share.table[place]:
                self.pages.transfer(block.page, owner, Keeper.PREFIXES)
                share.num_kept += max(0, min(page_size, len(row.request.request.prompt) - place * page_size))
            else:
                # Steps in flight read the page that is freed before any other step writes to it.
                self.pages.free_number(share.table[place], owner)
                share.table[place] = block.page
                self._decoding.replace(share.slot, place, block.page)

    def _keep_states(self, prefixes: PrefixIndex, share: Share, row: ComputedTokens) -> None:
        path = prefixes.path(row.request.id)
        for num_tokens in [place for place in share.written if place <= row.num_computed_tokens]:
            checkpoint, depth = share.written.pop(num_tokens), num_tokens // self.limits.page_size
            if depth <= len(path) and not row.not_finite:
                prefixes.attach(path[depth - 1], checkpoint)
            prefixes.drop(checkpoint)

    def _keep_end(self, prefixes: PrefixIndex, share: Share, last: ComputedTokens) -> None:
        """Keeps the state after the last token of a request that ends, and the page with the last of its tokens if it is not full."""
        owner, page_size = last.request.id, self.limits.page_size
        count = min(last.num_computed_tokens, last.num_tokens - prefixes.drafts)
        path, (place, length) = prefixes.path(owner), divmod(count, page_size)
        # A decode step has a slot for the state after each token, and computes at least one; a prefill step has the last one alone.
        index = 0 if last.first is None else count - last.first - 1
        own = share.source is None and count == last.num_computed_tokens
        exact = own if last.first is None else 0 <= index < last.num_computed_tokens - last.first
        if not exact or len(path) != place or share.flushes != prefixes.flushes:
            return
        slot = self.state_slots.owned(owner)[index]
        if length:
            tokens = last.key_ids(place * page_size, length + prefixes.drafts)
            if prefixes.end(owner, last.request.request.cache_salt, tokens, share.table[place], slot):
                self.pages.transfer(share.table[place], owner, Keeper.PREFIXES)
                self.state_slots.transfer(slot, owner, Keeper.PREFIXES)
        elif path and path[-1].known and path[-1].checkpoint is None:
            self.state_slots.transfer(slot, owner, Keeper.PREFIXES)
            prefixes.attach(path[-1], prefixes.new_checkpoint(slot))
