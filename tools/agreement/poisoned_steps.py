"""Test cases of one step, in which everything that no live row may read is NaN.

NaN fills the null page and slot, pages and slots that no request owns, and the part of a row's last page that is not written yet. If
any of it leaks into a live row, a compared value becomes NaN, and NaN agrees with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...graphs.steps import request_slot
from ...graphs.steps.kind import StepKind
from ...graphs.steps.table import REQUEST_INPUTS, StepInputs, kind_of
from ...graphs.types import Bucket, Leaf, Limits, Signature
from .poison import filled as filled_tensor
from .pools import (
    FreePlaces,
    PoolPlaces,
    fill,
    filled_pages,
    is_picture_pool,
    is_request_slots,
    keeps_first_slots,
    request_slot_pool,
    unread_value,
)

Step = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""An executable, or what runs one step otherwise: operands to results."""

UNREAD = -(10**6)
"""In places of drafts that a step does not verify: no token."""


@dataclass(frozen=True, kw_only=True)
class LiveRow(PoolPlaces):
    """One live row of a test case, with its places: pages with room for drafts, and the state slots that it writes.

    Attributes:
        row: index in the batch.
        start, count: tokens in the cache before the step, and new tokens, or patches, in it.
        read: the state slot it starts from.
        unwritten: further state slots of the request, that steps of more tokens write.
        pictures: of each new token, and of the one that follows, the row of a picture in its place, or 0; [] where graphs take none. Of a
            segment the rows that it writes.
    """

    row: int
    start: int = 0
    count: int
    read: int = 0
    unwritten: Sequence[int] = ()


@dataclass(frozen=True)
class PoisonedStep:
    """A test case: operands of one step in signature order, and its live rows; all that these must not read is NaN."""

    kind: StepKind
    operands: list[torch.Tensor]
    live: list[LiveRow]

    @property
    def rows(self) -> list[int]:
        """Indices of the live rows in the batch."""
        return [row.row for row in self.live]

    def written(self, leaf: Leaf) -> list[int]:
        """Places of a pool that the step writes: those of its live rows, and the null one, which rows of padding write."""
        writes = leaf.aval.axes[0] in self.kind.writes
        return [0, *(place for row in self.live for place in row.of(leaf))] if writes else []


CACHED = 1024
"""Most tokens that a row has in the cache: what a test case takes must not grow with the context."""


@dataclass(frozen=True)
class ProvedStep:
    """A step that is proved: what its test cases have in common.

    Attributes:
        vocab: tokens are below it.
    """

    bucket: Bucket
    signature: Signature
    limits: Limits
    params: Sequence[torch.Tensor]
    vocab: int


def poisoned_step(step: ProvedStep, generator: torch.Generator, *, share: int = 1, turn: int = 0, chunk: int | None = None) -> PoisonedStep:
    """A step of one row with random tokens, lengths and cached state, and NaN elsewhere.

    Args:
        share: the row takes no more pages and pictures than as many may have of each pool; a segment alone is as long as the bucket.
        turn: which row it is: of each three one has a bitmask and one adjustments.
        chunk: most new tokens in prefill; None is the bucket's.
    """
    kind, signature, limits = kind_of(step.bucket), step.signature, step.limits
    if kind.tower:
        row, inputs = _random_segment(step, share, generator)
        state = [_random_pool(leaf, [], [], generator) for leaf in signature.state]
        return PoisonedStep(kind, [*step.params, *state, *inputs.values()], [row])
    row = _random_row(step.bucket, limits, share, chunk or step.bucket.q_len, generator)
    tokens = torch.randint(0, step.vocab, (step.bucket.q_len,), generator=generator).tolist()
    filled = filled_pages(row.pages, row.start, limits.page_size)
    state = [_random_pool(leaf, filled, [slot_read(leaf, row)], generator) for leaf in signature.state]
    for pool in (pool for leaf, pool in zip(signature.state, state, strict=True) if is_picture_pool(leaf)):
        for place in (place for place in row.pictures if place):
            pool[place] = torch.randn(pool.shape[1:], generator=generator).to(pool.dtype)
    if kind.decodes:
        candidates = [*tokens, *[UNREAD] * (limits.drafts + 1 - step.bucket.q_len)]
        offset, accepted = -_random(0, row.start, generator) if limits.picture_rows else 0, [*row.slots, *row.unwritten].index(row.read)
        slot = request_slot.start(row.start, candidates, limits, offset, accepted)
        state[request_slot_pool(signature.state)][row.request_slot] = slot
    inputs = _inputs(step, row, tokens[: row.count], turn, generator)
    return PoisonedStep(kind, [*step.params, *state, *(inputs[leaf.path] for leaf in signature.inputs)], [row])


def _random_row(bucket: Bucket, limits: Limits, share: int, chunk: int, generator: torch.Generator) -> LiveRow:
    """A live row with at most a share of the pages and a chunk of tokens."""
    decode, Q, P, ahead = kind_of(bucket).decodes, bucket.q_len, limits.page_size, 2 * limits.drafts
    free = FreePlaces(limits, generator)
    most_pages = min(limits.pages_per_request, max(1, len(free.pages) // share))
    most = min(most_pages * P, CACHED + Q)
    # A prefill reads and writes the same slot when served; with two slots a state that was not written shows as NaN.
    separate = not decode and len(free.slots) > 1
    count = Q if decode else _random(1, max(1, min(chunk, most - ahead)), generator)
    start = _random(0 if not decode else 1, max(1, most - count - ahead), generator)
    pages = [free.pages.pop() for _ in range(min(most_pages, -(-(start + count + ahead) // P)))]
    slots = [free.slots.pop() for _ in range(Q if decode else 1)]
    unwritten = [free.slots.pop() for _ in range(limits.drafts + 1 - Q)] if decode else []
    # A narrow step may follow a wide one, and start from a slot that it does not write.
    read = free.slots.pop() if separate else [*slots, *unwritten][_random(0, len(slots) + len(unwritten) - 1, generator)]
    unread = list(range(1, limits.picture_rows))
    pictures = [] if decode or not unread else _random_pictures(count, unread, share, generator)
    own = pages, slots, free.request_slots.pop(), pictures
    return LiveRow(*own, row=0, start=start, count=count, read=read, unwritten=unwritten)


def _random_segment(step: ProvedStep, share: int, generator: torch.Generator) -> tuple[LiveRow, dict[str, torch.Tensor]]:
    """The live row of an encode step, with at most a share of the pool, and the inputs of the step in signature order."""
    inputs = {leaf.path: torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in step.signature.inputs}
    (size,), most = (leaf.aval.shape[0] for leaf in step.signature.state), inputs["picture_rows"].shape[1]
    free, merge = torch.randperm(size - 1, generator=generator) + 1, math.isqrt(step.bucket.q_len // most)
    height = next(number for number in range(math.isqrt(most), 0, -1) if most % number == 0)
    width = most // height
    if share > 1:
        largest = min(most, (size - 1) // share)
        height = _random(1, largest, generator)
        width = _random(1, largest // height, generator)
    places, count = free[: height * width], height * width * merge**2
    shape = count, inputs["patches"].shape[-1]
    inputs["patches"][0, :count] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    inputs["grids"][0] = torch.tensor([height * merge, width * merge])
    inputs["picture_rows"][0, : len(places)] = places
    return LiveRow(pictures=places.tolist(), row=0, count=count), inputs


def _random_pictures(count: int, unread: list[int], share: int, generator: torch.Generator) -> list[int]:
    """Rows of a picture in the places of some of a chunk's tokens, and of the one that follows, which are taken from `unread`.

    The last token of a chunk is text, as that of a prompt is: what its position is decides those of what follows.
    """
    begin = _random(0, count - 1, generator)
    length = min(_random(0, count - 1 - begin, generator), len(unread) // share - 1) if count > 1 else 0
    places = [0] * (count + 1)
    for token in (*range(begin, begin + max(length, 0)), *([count] if unread and _random(0, 1, generator) else ())):
        places[token] = unread.pop()
    return places


def _inputs(step: ProvedStep, row: LiveRow, tokens: Sequence[int], turn: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Every input that a bucket of any artifact may have, by name."""
    inputs = StepInputs(step.bucket, step.limits).padding(list(REQUEST_INPUTS))
    numbers = {"num_computed_tokens": row.start, "query_lens": row.count, "state_slots_in": row.read, "drafts": step.bucket.q_len - 1}
    numbers |= {"base": row.start, "logprobs": turn % 2, "next_tokens": _random(-1, step.vocab - 1, generator)}
    fill_row(inputs, 0, row.pages, [*row.slots, *row.unwritten], tokens, request_slots=row.request_slot, **numbers)
    if row.pictures:
        offset = _random(0, row.start, generator)
        inputs["picture_rows"][0, : row.count + 1] = torch.tensor(row.pictures)
        for i, place in enumerate(row.pictures[: row.count]):
            behind = [0, _random(0, 9, generator), _random(0, 9, generator)] if place else [0, 0, 0]
            inputs["positions"][0, i] = torch.tensor([row.start - offset + i + axis for axis in behind])
    if turn % 3 == 0 and len(masks := inputs["bitmask"]):
        inputs["bitmask_rows"][0], masks[0] = 1, random_words(masks[0].shape, generator)
    adjust(inputs, [0] if turn % 3 == 1 else [], generator)
    return inputs


def fill_row(
    inputs: Mapping[str, torch.Tensor], row: int, pages: Sequence[int], state_slots: Sequence[int], tokens: Sequence[int], **numbers: float
) -> None:
    """Gives a row of a step its pages, state slots and new tokens, and a number for each other input.

    A decode step has no tokens among its inputs: they are in the request slots.
    """
    for name, values in (("page_table", pages), ("tokens", tokens)):
        if values:
            inputs[name][row, : len(values)] = torch.tensor(values, dtype=torch.int32)
    inputs["state_slots_out"][row] = torch.tensor(state_slots)
    for name, number in numbers.items():
        inputs[name][row] = number


def random_words(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Words of a bitmask with about half of their bits set."""
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def adjust(inputs: Mapping[str, torch.Tensor], rows: Sequence[int], generator: torch.Generator) -> None:
    """Gives rows adjustments of their logits, from the last ones down: a bias and a penalty while there are two, else one of them."""
    tables, seen = inputs["adjustments"], inputs["seen"]
    left, sets = len(tables), len(seen)
    for row in rows:
        for name in ("bias_rows", "penalty_rows"):
            if left:
                inputs[name][row] = left
                left -= 1
                tables[left] = torch.randn(tables[left].shape, generator=generator)
        if sets:
            inputs["seen_rows"][row], inputs["repetition_penalty"][row] = sets, 1.3
            sets -= 1
            seen[sets] = random_words(seen[sets].shape, generator)


def _random_pool(leaf: Leaf, filled: list[tuple[int, int]], slots: list[int], generator: torch.Generator) -> torch.Tensor:
    """A state pool with random values in what is filled: (page, tokens in it), or slots."""
    if is_request_slots(leaf):
        return torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype)
    pool = filled_tensor(leaf.aval.shape, unread_value(leaf), leaf.aval.dtype)
    fill(leaf, pool, filled, slots, generator)
    return pool


def slot_read(leaf: Leaf, row: LiveRow) -> int:
    """The slot of a pool that a row's step reads."""
    return row.slots[0] if keeps_first_slots(leaf) and len(row.slots) > 1 else row.read


def live_counts(batch: int) -> list[int]:
    """Numbers of live rows with which a bucket is run."""
    return sorted({1, batch // 2 + 1, batch})


def drafted_step(
    reference: Step, step: ProvedStep, generator: torch.Generator, *, share: int, turn: int, chunk: int | None = None
) -> PoisonedStep:
    """As `poisoned_step`; of the drafts of a decode step the first `turn` modulo Q are right, so that all counts occur.

    Which draft is right depends on those before it, so the reference runs once for each place that has a right one.
    """
    case, signature = poisoned_step(step, generator, share=share, turn=turn, chunk=chunk), step.signature
    for place in range(turn % step.bucket.q_len if case.kind.decodes else 0):
        (row,), pool = case.live, case.operands[len(signature.params) + request_slot_pool(signature.state)]
        pool[row.request_slot, request_slot.TOKENS + 1 + place] = _run_undone(reference, case, signature)["tokens"][0, place]
    return case


def run_step(executable: Step, case: PoisonedStep, signature: Signature) -> dict[str, torch.Tensor]:
    """Outputs by name; the case's pools have afterwards what the step left."""
    return dict(zip((leaf.path for leaf in signature.outputs), executable(case.operands), strict=True))


def _run_undone(executable: Step, case: PoisonedStep, signature: Signature) -> dict[str, torch.Tensor]:
    """As `run_step`; where the step may write, the case's own pools are afterwards what they were."""
    pools = case.operands[len(signature.params) : len(signature.params) + len(signature.state)]
    places = [case.written(leaf) for leaf in signature.state]
    before = [pool[at] for pool, at in zip(pools, places, strict=True)]
    outputs = run_step(executable, case, signature)
    for pool, at, was in zip(pools, places, before, strict=True):
        pool[at] = was
    return outputs


def _random(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))
