"""Rows whose step was run alone, and steps of many of them together: whatever company a row has, it computes the same.

A row is run alone once, and expected of every batch that has it, at other places of the batch and of all pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...graphs.errors import VerifyError
from ...graphs.steps.inputs import OPTIONAL_ROWS
from ...graphs.steps.table import kind_of
from ...graphs.types import Leaf
from ...lowering.executable import Executable
from ...models import request_slots
from .compare import Differences, differences_of, live_values
from .poison import filled
from .poisoned_steps import LiveRow, PoisonedStep, ProvedStep, drafted_step, poisoned_step, run_step, slot_read
from .pools import FreePlaces, is_request_slots, is_state_slots, keeps_first_slots, request_slot_pool, unread_value
from .tolerances import Measure, Pairs

DECODED, PREFILLED = 4, 2
"""Rows that are run alone for each seed, if batches have as many; of decode steps at least one for each number of right drafts."""

OWN_BYTES = 2**30
"""Of pools, up to which each row of a step has places of its own."""


def owned(row: LiveRow) -> LiveRow:
    """A row with all that it has of pools: behind the state slots that it writes are others, one of which it may read."""
    own = [*row.slots, *row.unwritten]
    return replace(row, slots=[*own, *({row.read} - {*own, 0})], pictures=[place for place in row.pictures if place])


@dataclass(frozen=True)
class RowAlone:
    """A row that was run alone.

    Attributes:
        fair: whether pools have room for a full batch of such rows.
        inputs, outputs: by name, of a batch of one row.
        before: of each state leaf which of the row's places the step reads, and what they have.
        after: of each state leaf what the step leaves in the row's places; of state slots in those that it writes.
    """

    row: LiveRow
    fair: bool
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    before: list[tuple[list[int], torch.Tensor]]
    after: list[torch.Tensor]

    @property
    def accepted(self) -> int | None:
        """Accepted tokens of a decode step; None of other steps."""
        return int(self.outputs["counts"]) if "counts" in self.outputs else None

    def values_after(self, position: int, leaf: Leaf, accepted: bool) -> list[torch.Tensor]:
        """Values of the row in the pool of a state leaf after the step, in parts; on request only those of accepted tokens."""
        row, (pages, slots, pictures) = self.row, ([*range(len(each))] for each in (self.row.pages, self.row.slots, self.row.pictures))
        compact = replace(row, row=0, request_slot=0, pages=pages, slots=slots, pictures=pictures)
        return live_values(leaf, compact, self.after[position], self.accepted if accepted else None)


def rows_alone(
    reference: Executable,
    step: ProvedStep,
    batch: int,
    seeds: int,
    sharing: int = 1,
    guess: Executable | None = None,
    narrower: tuple[Executable, ProvedStep] | None = None,
) -> list[RowAlone]:
    """Random rows for the buckets of a kind and width.

    Args:
        reference, step: the graph of one row.
        batch: of the largest bucket.
        guess: what says, sooner than the reference, which drafts are right. One that is wrong makes wrong drafts and harms nothing else.
        sharing: rows that have as many tokens together as one may have; all but the first are as short, and there are at least two of them.
        narrower: graph of one row of fewer tokens, which runs all but the first: what differs is padding.

    Raises:
        VerifyError: the reference read what no row may read.
    """
    bucket, signature = step.bucket, step.signature
    decode, first, found = kind_of(bucket).decodes, len(signature.params), list[RowAlone]()
    last, each = first + len(signature.state), min(batch, max(DECODED, bucket.q_len) if decode else PREFILLED)
    for turn in range(max(seeds * each, 3 if sharing > 1 else 0)):
        # One row of each seed may be as long as the pools allow.
        long, generator = turn % each == 0 if sharing == 1 else turn == 0, torch.Generator().manual_seed(turn)
        executable, one_row = (reference, step) if long or not narrower else narrower
        share, chunk = (1, bucket.q_len) if long else (max(batch, sharing), max(1, min(one_row.bucket.q_len, bucket.q_len // sharing)))
        case = drafted_step(guess or executable, one_row, generator, share=share, turn=turn, chunk=chunk)
        if guess and decode and turn % bucket.q_len:
            again = torch.Generator().manual_seed(turn)
            case = _with_drafts(poisoned_step(step, again, share=share, turn=turn, chunk=chunk), case, step)
        row, places = case.live[0], owned(case.live[0])
        reads = [places.of(leaf) if leaf.aval.axes[0] in case.kind.reads else [] for leaf in signature.state]
        pools = case.operands[first:last]
        before = [_before(leaf, pool, row, own) for leaf, pool, own in zip(signature.state, pools, reads, strict=True)]
        outputs = run_step(executable, case, one_row.signature)
        inputs = {leaf.path: operand for leaf, operand in zip(one_row.signature.inputs, case.operands[last:], strict=True)}
        inputs = {leaf.path: _widened(leaf, inputs[leaf.path], case.kind.padding[leaf.path]) for leaf in signature.inputs}
        written = [row.slots if is_state_slots(leaf) else places.of(leaf) for leaf in signature.state]
        after = [pool[at] for pool, at in zip(pools, written, strict=True)]
        if any(output[0][case.kind.live(name, row.count)].isnan().any() for name, output in outputs.items()):
            raise VerifyError(f"{bucket.name} (eager): a row alone gives NaN, which is what fills all places that no row may read")
        found.append(RowAlone(row, share >= batch, inputs, outputs, before, after))
    return found


def _with_drafts(case: PoisonedStep, guessed: PoisonedStep, step: ProvedStep) -> PoisonedStep:
    """A case of one row with the drafts of another of it, whose pools an executable may have spoiled."""
    position, at = len(step.params) + request_slot_pool(step.signature.state), request_slots.TOKENS + 1
    own, other = (each.operands[position][each.live[0].request_slot, at : at + step.bucket.q_len - 1] for each in (case, guessed))
    own.copy_(other.clamp(0, step.vocab - 1))
    return case


def _widened(leaf: Leaf, operand: torch.Tensor, padding: float) -> torch.Tensor:
    """An input of one row with as many tokens as `leaf` has."""
    wide = torch.full(leaf.aval.shape, padding, dtype=operand.dtype)
    wide[tuple(slice(size) for size in operand.shape)] = operand
    return wide


def _before(leaf: Leaf, pool: torch.Tensor, row: LiveRow, own: list[int]) -> tuple[list[int], torch.Tensor]:
    read = [own.index(slot_read(leaf, row))] if is_state_slots(leaf) else [*range(len(own))]
    return read, pool[[own[i] for i in read]]


class Together:
    """A step of `live` rows that were run alone, at random places of the batch; all that they must not read is NaN.

    Rows that take more than `OWN_BYTES` of the pools share: a row that is in the step already is there again with the places of the
    first, all but what it reads and writes, as all of them write the same.

    Attributes:
        pools, inputs: of the step, in the order of the signature, and by name.
        case: the step.
        rows: the row alone that each of its live rows is.
    """

    def __init__(self, known: Sequence[RowAlone], step: ProvedStep, live: int, generator: torch.Generator, dealt: Counter[int]) -> None:
        """`dealt` counts how often each row was taken; the step takes those that were least often."""
        bucket, signature, limits = step.bucket, step.signature, step.limits
        self._signature, self._known, self._free = signature, known, FreePlaces(limits, generator)
        self._pictures = [1 + place for place in torch.randperm(max(limits.picture_rows - 1, 0), generator=generator).tolist()]
        self.pools = [_unread(leaf) for leaf in signature.state]
        kind = kind_of(bucket)
        self.inputs = {leaf.path: torch.full(leaf.aval.shape, kind.padding[leaf.path], dtype=leaf.aval.dtype) for leaf in signature.inputs}
        self._tables: dict[str, dict[tuple[int, int], int]] = {name: {} for name in OPTIONAL_ROWS if name in self.inputs}
        width = max(len(owned(each.row).slots) for each in known)
        # As where rows are made together: with a slot to read and one to write a state that was not written shows as NaN.
        self._separate = len(self._free.slots) >= live * width
        largest = max(sum(after.nbytes for after in each.after) for each in known)
        self._shares = live * largest > OWN_BYTES and kind.samples and (kind.decodes or self._separate)
        self._first, self._again = dict[int, LiveRow](), dict[int, list[int]]()
        self.rows, placed = list[RowAlone](), list[LiveRow]()
        places = sorted(torch.randperm(bucket.batch, generator=generator)[:live].tolist())
        for left, place in zip(reversed(range(live)), places, strict=True):
            order = torch.randperm(len(known), generator=generator).tolist()
            chosen = next(i for i in sorted(order, key=dealt.__getitem__) if self._fits(i, left))
            dealt[chosen] += 1
            self.rows.append(known[chosen])
            placed.append(self._place(place, chosen))
        for name, other in ((each.name, each.other) for each in kind.inputs if each.other is not None):
            own, self.inputs[name] = self.inputs[name], torch.full_like(self.inputs[name], other)
            for row in placed:
                self.inputs[name][row.row, : row.count] = own[row.row, : row.count]
        self.case = PoisonedStep(kind, [*step.params, *self.pools, *self.inputs.values()], placed)

    def differences(self, candidate: Executable, measure: Measure) -> Differences:
        """Runs the step, which changes its pools, and compares each row with what it gave alone."""
        outputs = dict(zip((leaf.path for leaf in self._signature.outputs), candidate(self.case.operands), strict=True))
        return self.compared(outputs, self.pools, measure)

    def compared(
        self,
        outputs: Mapping[str, torch.Tensor],
        pools: Sequence[torch.Tensor],
        measure: Measure,
        part: Callable[[Leaf, torch.Tensor], torch.Tensor] = lambda _, value: value,
    ) -> Differences:
        """Compares what a run gave each row with what it gave alone.

        Args:
            outputs: by name.
            pools: behind the step.
            part: of values of a pool, what the run has of them.
        """
        leaves = self._signature.state
        of = {
            place: replace(alone, after=[part(leaf, value) for leaf, value in zip(leaves, alone.after, strict=True)])
            for place, alone in zip(self.case.rows, self.rows, strict=True)
        }
        expected = {name: {place: alone.outputs[name][0] for place, alone in of.items()} for name in outputs}

        def values(position: int, row: LiveRow, accepted: bool) -> Pairs:
            leaf, alone, pool = leaves[position], of[row.row], pools[position]
            if row.row in self._again and not is_request_slots(leaf):
                own = [i for i in self._again[row.row] if is_state_slots(leaf) and not (i and keeps_first_slots(leaf))]
                return ((alone.after[position][i], pool[row.slots[i]]) for i in own)
            here = live_values(leaf, row, pool, alone.accepted if accepted else None)
            return zip(alone.values_after(position, leaf, accepted), here, strict=True)

        return differences_of(self.case, expected, outputs, [*zip(leaves, pools, strict=True)], values, measure)

    def _fits(self, chosen: int, left: int) -> bool:
        """Whether a row fits, with room for `left` fair rows behind it."""
        alone = self._known[chosen]
        for table, whose in OPTIONAL_ROWS.items():
            if table in self._tables:
                wanted = {(chosen, int(alone.inputs[name])) for name in whose} - {(chosen, 0)}
                if len(self._tables[table].keys() | wanted) > len(self.inputs[table]):
                    return False
        if alone.fair:
            return True
        fair = [owned(each.row) for each in self._known if each.fair]
        own = owned(alone.row)
        pages, pictures = (max((len(each) for each in some), default=0) for some in ([p.pages for p in fair], [p.pictures for p in fair]))
        return len(own.pages) + left * pages <= len(self._free.pages) and len(own.pictures) + left * pictures <= len(self._pictures)

    def _place(self, row: int, chosen: int) -> LiveRow:
        """Gives a row its places, and writes what it reads there."""
        alone = self._known[chosen]
        old, new = owned(alone.row), self._places(row, chosen)
        for leaf, pool, (read, before) in zip(self._signature.state, self.pools, alone.before, strict=True):
            own = new.of(leaf)
            if read and (row not in self._again or is_request_slots(leaf) or is_state_slots(leaf)):
                pool[[own[i] for i in read]] = before
        slots = dict(zip(old.slots, new.slots, strict=True))
        moved = {"page_table": dict(zip(old.pages, new.pages, strict=True)), "state_slots_out": slots, "state_slots_in": slots}
        moved |= {"request_slots": {old.request_slot: new.request_slot}, "picture_rows": dict(zip(old.pictures, new.pictures, strict=True))}
        moved |= self._fill_tables(alone, chosen)
        for name, operand in self.inputs.items():
            if name not in OPTIONAL_ROWS:
                value = alone.inputs[name][0].clone()
                if name in moved and value.any():
                    value[value != 0] = torch.tensor([moved[name][place] for place in value[value != 0].tolist()], dtype=value.dtype)
                operand[row] = value
        count, unwritten = len(alone.row.slots), len(alone.row.unwritten)
        return replace(new, read=slots.get(alone.row.read, 0), slots=new.slots[:count], unwritten=new.slots[count : count + unwritten])

    def _places(self, row: int, chosen: int) -> LiveRow:
        """A row with places as of `owned`: new ones, or where rows share those of the first that is the same but for what it reads."""
        alone, free = self._known[chosen].row, self._free
        old = owned(alone)
        old = replace(old, row=row, request_slot=free.request_slots.pop() if old.request_slot else 0)
        if chosen in self._first:
            first, read = self._first[chosen], {slot_read(leaf, alone) for leaf in self._signature.state if is_state_slots(leaf)}
            self._again[row] = [i for i, slot in enumerate(alone.slots) if slot in read]
            slots = [free.slots.pop() if i in self._again[row] else slot for i, slot in enumerate(first.slots)]
            return replace(first, row=row, slots=slots, request_slot=old.request_slot)
        fixed = [free.slots.pop() for _ in (*alone.slots, *alone.unwritten)]
        read_only = [free.slots.pop() if self._separate else fixed[0] for _ in old.slots[len(fixed) :]]
        pages, pictures = [free.pages.pop() for _ in old.pages], [self._pictures.pop() for _ in old.pictures]
        new = replace(old, pages=pages, slots=[*fixed, *read_only], pictures=pictures)
        if self._shares:
            self._first[chosen] = new
        return new

    def _fill_tables(self, alone: RowAlone, chosen: int) -> dict[str, dict[int, int]]:
        """Enters a row's bitmask and adjustments in the step's, once for all that are the same; returns where they were and are."""
        moved: dict[str, dict[int, int]] = {}
        for table, known in self._tables.items():
            for name in OPTIONAL_ROWS[table]:
                if at := int(alone.inputs[name]):
                    place = known.setdefault((chosen, at), len(known) + 1)
                    self.inputs[table][place - 1] = alone.inputs[table][at - 1]
                    moved[name] = {at: place}
        return moved


def _unread(leaf: Leaf) -> torch.Tensor:
    """A pool in which nothing may be read."""
    shape, dtype = leaf.aval.shape, leaf.aval.dtype
    return torch.zeros(shape, dtype=dtype) if is_request_slots(leaf) else filled(shape, unread_value(leaf), dtype)
