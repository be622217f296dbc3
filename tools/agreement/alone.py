"""Rows whose step was run alone, and steps of many of them together: whatever company a row has, it computes the same.

A row is run alone once, and expected of every batch that has it, at other places of the batch and of all pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...graphs.step_inputs import OPTIONAL_ROWS, StepInputs
from ...graphs.types import Leaf
from ...lowering.executable import Executable
from .compare import Differences, differences_of, live_values
from .poison import filled
from .poisoned_steps import LiveRow, PoisonedStep, ProvedStep, drafted_step, run_step
from .pools import FreePlaces, is_paged, is_picture_pool, is_request_slots, unread_value
from .tolerances import Measure, Pairs

DECODED, PREFILLED = 4, 2
"""Rows that are run alone for each seed, if batches have as many; of decode steps at least one for each number of right drafts."""


@dataclass(frozen=True)
class Places:
    """What one row has of all pools; behind the state slots that it writes are others, one of which it may read."""

    pages: list[int]
    slots: list[int]
    request_slot: int
    pictures: list[int]

    @staticmethod
    def of(row: LiveRow) -> Places:
        own = [*row.slots, *row.unwritten]
        slots = [*own, *({row.read} - {*own})]
        return Places(row.pages, slots, row.request_slot, [place for place in row.pictures if place])

    def in_pool(self, leaf: Leaf) -> list[int]:
        """Of the pool of a state leaf."""
        if is_request_slots(leaf):
            return [self.request_slot]
        if is_picture_pool(leaf):
            return self.pictures
        return self.pages if is_paged(leaf) else self.slots


@dataclass(frozen=True)
class RowAlone:
    """A row that was run alone.

    Attributes:
        fair: whether pools have room for a full batch of such rows.
        inputs, outputs: by name, of a batch of one row.
        before, after: of each state leaf what the row's places have, before the step and after it.
    """

    row: LiveRow
    fair: bool
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    before: list[torch.Tensor]
    after: list[torch.Tensor]

    def values_after(self, position: int, leaf: Leaf, accepted: bool) -> list[torch.Tensor]:
        """Values of the row in the pool of a state leaf after the step, in parts; on request only those of accepted tokens."""
        row = self.row
        compact = replace(row, row=0, request_slot=0, pages=[*range(len(row.pages))], slots=[*range(len(row.slots))])
        return live_values(leaf, compact, self.after[position], self.outputs.get("counts") if accepted else None)


def rows_alone(reference: Executable, step: ProvedStep, batch: int, seeds: int, sharing: int = 1) -> list[RowAlone]:
    """Random rows for the buckets of a kind and width.

    Args:
        reference, step: the graph of one row.
        batch: of the largest bucket.
        sharing: rows that have as many tokens together as one may have; all but the first are as short, and there are at least two of them.
    """
    bucket, signature = step.bucket, step.signature
    decode, first, found = bucket.kind == "decode", len(signature.params), list[RowAlone]()
    last, each = first + len(signature.state), min(batch, max(DECODED, bucket.q_len) if decode else PREFILLED)
    for turn in range(max(seeds * each, 3 if sharing > 1 else 0)):
        # One row of each seed may be as long as the pools allow.
        long, generator = turn % each == 0 if sharing == 1 else turn == 0, torch.Generator().manual_seed(turn)
        share, chunk = (1, bucket.q_len) if long else (max(batch, sharing), max(1, bucket.q_len // sharing))
        case = drafted_step(reference, step, 1, generator, share=share, turn=turn, chunk=chunk)
        own = [Places.of(case.live[0]).in_pool(leaf) for leaf in signature.state]
        before = [pool[at] for pool, at in zip(case.operands[first:last], own, strict=True)]
        outputs, pools = run_step(reference, case, signature)
        inputs = {leaf.path: operand for leaf, operand in zip(signature.inputs, case.operands[last:], strict=True)}
        after = [pool[at] for pool, at in zip(pools, own, strict=True)]
        found.append(RowAlone(case.live[0], share >= batch, inputs, outputs, before, after))
    return found


class Together:
    """A step of `live` rows that were run alone, at random places of the batch; all that they must not read is NaN.

    Attributes:
        case: the step.
        rows: the row alone that each of its live rows is.
    """

    def __init__(self, known: Sequence[RowAlone], step: ProvedStep, live: int, generator: torch.Generator, dealt: Counter[int]) -> None:
        """`dealt` counts how often each row was taken; the step takes those that were least often."""
        bucket, signature, limits = step.bucket, step.signature, step.limits
        self._signature, self._known, self._free = signature, known, FreePlaces(limits, generator)
        self._pictures = [1 + place for place in torch.randperm(max(limits.picture_rows - 1, 0), generator=generator).tolist()]
        self._pools = [_unread(leaf) for leaf in signature.state]
        padding = StepInputs(bucket, limits).padding([leaf.path for leaf in signature.inputs])
        self._inputs = {leaf.path: padding[leaf.path] for leaf in signature.inputs}
        self._tables: dict[str, dict[tuple[int, int], int]] = {name: {} for name in OPTIONAL_ROWS if name in self._inputs}
        width = max(len(Places.of(each.row).slots) for each in known)
        # As where rows are made together: with a slot to read and one to write a state that was not written shows as NaN.
        self._separate = len(self._free.slots) >= live * width
        self.rows, placed = list[RowAlone](), list[LiveRow]()
        places = sorted(torch.randperm(bucket.batch, generator=generator)[:live].tolist())
        for left, place in zip(reversed(range(live)), places, strict=True):
            order = torch.randperm(len(known), generator=generator).tolist()
            chosen = next(i for i in sorted(order, key=dealt.__getitem__) if self._fits(i, left))
            dealt[chosen] += 1
            self.rows.append(known[chosen])
            placed.append(self._place(place, chosen))
        self.case = PoisonedStep([*step.params, *self._pools, *self._inputs.values()], placed)

    def differences(self, candidate: Executable, measure: Measure) -> Differences:
        """Runs the step, which changes its pools, and compares each row with what it gave alone."""
        outputs = dict(zip((leaf.path for leaf in self._signature.outputs), candidate(self.case.operands), strict=True))
        expected = {name: torch.zeros_like(output) for name, output in outputs.items()}
        of = dict(zip(self.case.rows, self.rows, strict=True))
        for place, alone in of.items():
            for name, output in expected.items():
                output[place] = alone.outputs[name][0]

        def values(position: int, row: LiveRow, accepted: bool) -> Pairs:
            leaf, counts = self._signature.state[position], expected.get("counts") if accepted else None
            alone = of[row.row].values_after(position, leaf, accepted)
            return zip(alone, live_values(leaf, row, self._pools[position], counts), strict=True)

        return differences_of(self.case, expected, outputs, self._signature.state, values, measure)

    def _fits(self, chosen: int, left: int) -> bool:
        """Whether a row fits, with room for `left` fair rows behind it."""
        alone = self._known[chosen]
        for table, whose in OPTIONAL_ROWS.items():
            if table in self._tables:
                wanted = {(chosen, int(alone.inputs[name])) for name in whose} - {(chosen, 0)}
                if len(self._tables[table].keys() | wanted) > len(self._inputs[table]):
                    return False
        if alone.fair:
            return True
        fair = [Places.of(each.row) for each in self._known if each.fair]
        own = Places.of(alone.row)
        pages, pictures = (max((len(each) for each in some), default=0) for some in ([p.pages for p in fair], [p.pictures for p in fair]))
        return len(own.pages) + left * pages <= len(self._free.pages) and len(own.pictures) + left * pictures <= len(self._pictures)

    def _place(self, row: int, chosen: int) -> LiveRow:
        """Gives a row its places, and writes what it reads there."""
        alone, free = self._known[chosen], self._free
        old = Places.of(alone.row)
        written = [free.slots.pop() for _ in alone.row.slots]
        unwritten = [free.slots.pop() for _ in alone.row.unwritten]
        read = [free.slots.pop() if self._separate else written[0] for _ in old.slots[len(written) + len(unwritten) :]]
        pages, pictures = [free.pages.pop() for _ in old.pages], [self._pictures.pop() for _ in old.pictures]
        new = Places(pages, [*written, *unwritten, *read], free.request_slots.pop(), pictures)
        for leaf, pool, before in zip(self._signature.state, self._pools, alone.before, strict=True):
            for at, value in zip(new.in_pool(leaf), before, strict=True):
                pool[at] = value  # one after the other: where a row writes the slot that it reads, what it reads is last
        slots = dict(zip(old.slots, new.slots, strict=True))
        moved = {"page_table": dict(zip(old.pages, pages, strict=True)), "state_slots_out": slots, "state_slots_in": slots}
        moved |= {"request_slots": {old.request_slot: new.request_slot}, "picture_rows": dict(zip(old.pictures, pictures, strict=True))}
        moved |= self._fill_tables(alone, chosen)
        for name, operand in self._inputs.items():
            if name not in OPTIONAL_ROWS:
                value = alone.inputs[name][0].clone()
                if name in moved and value.any():
                    value[value != 0] = torch.tensor([moved[name][place] for place in value[value != 0].tolist()], dtype=value.dtype)
                operand[row] = value
        read_from = slots[alone.row.read]
        return replace(alone.row, row=row, request_slot=new.request_slot, pages=pages, slots=written, unwritten=unwritten, read=read_from)

    def _fill_tables(self, alone: RowAlone, chosen: int) -> dict[str, dict[int, int]]:
        """Enters a row's bitmask and adjustments in the step's, once for all that are the same; returns where they were and are."""
        moved: dict[str, dict[int, int]] = {}
        for table, known in self._tables.items():
            for name in OPTIONAL_ROWS[table]:
                if at := int(alone.inputs[name]):
                    place = known.setdefault((chosen, at), len(known) + 1)
                    self._inputs[table][place - 1] = alone.inputs[table][at - 1]
                    moved[name] = {at: place}
        return moved


def _unread(leaf: Leaf) -> torch.Tensor:
    """A pool in which nothing may be read."""
    shape, dtype = leaf.aval.shape, leaf.aval.dtype
    return torch.zeros(shape, dtype=dtype) if is_request_slots(leaf) else filled(shape, unread_value(leaf), dtype)
