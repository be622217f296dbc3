"""Choice of the bucket of a step, or of its sizes where these are values; what a step is taken to cost if nothing is measured."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from ...graphs.errors import SpecError
from ...graphs.steps.decode import DECODE
from ...graphs.steps.kind import StepKind
from ...graphs.steps.kind import price as price
from ...graphs.steps.prefill import PREFILL
from ...graphs.types import Bucket

Cost = Callable[[Bucket], float]
"""What a step of a bucket costs, in whatever unit is the same for all."""

CLEARLY = 2 / 3
"""Several steps are taken in place of one where they cost at most this part of it: prices of steps are estimates, and the host works
between two steps."""


NEARLY = 0.95
"""Steps that compute at least this part of the tokens that the best one does, for what they cost, count as equally good."""


def choose(buckets: Iterable[Bucket], live: int) -> Bucket:
    """The decode bucket with the smallest batch that holds `live` rows; the largest when none does, and the caller splits the rows.

    Raises:
        SpecError: when there is no decode bucket, or `live` is below 1.
    """
    if live < 1:
        raise SpecError(f"a decode bucket for {live} rows; legal is at least 1")
    decode = DECODE.needed(buckets)
    return next((b for b in decode if b.batch >= live), decode[-1])


def default_fixed_tokens(buckets: Iterable[Bucket]) -> float:
    """`fixed_tokens` where nothing is known of a machine or model: a step of the smallest prefill bucket costs twice its tokens, as
    nobody builds one so small that its tokens matter less."""
    return math.sqrt(3) * min(bucket.tokens for bucket in PREFILL.needed(buckets))


def choose_prefill(
    buckets: Iterable[Bucket], remaining: Sequence[Sequence[int]], cost: Cost | None = None, between: float = 0.0, kind: StepKind = PREFILL
) -> Bucket:
    """The prefill bucket that wastes least on the oldest prompts of every dp group, and as much of each as a row holds.

    The oldest prompt of every group comes first. The longest of these decides how long a chunk is: what a prompt by itself would get
    (`Alone`), which is all that is left of it, or as much as any bucket holds, or less where several steps cost clearly less. Only
    buckets are considered that hold such a chunk. Of those, the one is chosen that saves most against prefilling its rows one after the
    other: what the step costs, less what each row's prompt by itself costs before the step and does not after it. So prompts share a step
    only where that costs no more. Among equals more prompts share.

    All groups run every step together, so one after the other means the first prompts of all groups together, then the second ones.

    Counted are prefill steps, and in the choice of a chunk's length the decode steps between the chunks of a prompt: its first token
    waits for them. They do not count in what prompts save that share a step, since streams would wait for that step as a whole.

    Args:
        remaining: of each group, tokens left of its prompts, oldest first; a bucket of B rows takes the first B of each.
        cost: of a prefill step; None is `price` with `default_fixed_tokens`.
        between: cost of what runs between two prefill steps: of decode steps, as many as there are on average; 0 while nobody decodes.
        kind: of the buckets, where they are of another one whose rows are chunks.

    Raises:
        SpecError: when there is no prefill bucket, no prompt, or one with fewer than 1 token left.
    """
    if not any(remaining) or min(itertools.chain.from_iterable(remaining)) < 1:
        raise SpecError(f"a prefill bucket for prompts of {[list(own) for own in remaining]} tokens; legal is one or more, of at least 1")
    prefill = sorted(kind.needed(buckets), key=lambda b: (b.tokens, b))
    if len(prefill) == 1:
        return prefill[0]
    if cost is None:
        fixed = default_fixed_tokens(prefill)
        costs = {b: price(b, fixed) for b in prefill}
    else:
        costs = {b: cost(b) for b in prefill}
    alone = _alone(tuple((b.q_len, costs[b]) for b in prefill), between)
    # The first prompts of all groups, the second ones, ...: the longest of each decides, as all are padded to it.
    lengths = [max(column) for column in itertools.zip_longest(*remaining, fillvalue=0)]

    def loss(bucket: Bucket) -> float:
        """What the step costs, less what it saves."""
        rows = lengths[: bucket.batch]
        return costs[bucket] - sum(alone.cost(length) - alone.cost(max(length - bucket.q_len, 0)) for length in rows)

    chunk = alone.chunk(lengths[0])
    return min((b for b in prefill if b.q_len >= chunk), key=lambda b: (loss(b), -b.batch))


def choose_sizes(remaining: Sequence[int], tokens: int, longest: int, fixed_tokens: float) -> Bucket:
    """The sizes of a prefill step that computes most tokens for what it costs, where rows and tokens a row are values.

    The oldest prompt gets a chunk of all that is left of it, or as long as there may be. Other rows are the next prompts, which may get a
    part of theirs: so nothing need be padded. Among steps that are `NEARLY` as good it is the one that ends most prompts.

    Args:
        remaining: tokens left of prompts, oldest first.
        tokens: most of a step, padding included.
        longest: most of a chunk.
        fixed_tokens: as of `price`.

    Raises:
        SpecError: there is no prompt, or one with fewer than 1 token left, or there may be no token.
    """
    if min((*remaining, tokens, longest), default=0) < 1 or not remaining:
        raise SpecError(f"a prefill step of {tokens} tokens for prompts of {list(remaining)}; legal is one or more of each, of at least 1")
    lengths = [min(left, longest, tokens) for left in remaining]
    steps = list[tuple[float, int, Bucket]]()
    for length in sorted({length for length in lengths if length >= lengths[0]}):
        computed = ended = 0
        for rows, left in enumerate(remaining[: tokens // length], 1):
            computed, ended = computed + min(left, length), ended + (left <= length)
            bucket = PREFILL.bucket(rows, length)
            steps.append((computed / price(bucket, fixed_tokens), ended, bucket))
    best = max(rate for rate, _, _ in steps)
    return max((ended, rate, bucket) for rate, ended, bucket in steps if rate >= NEARLY * best)[2]


def tokens_for(units: float, fixed_tokens: float) -> int:
    """Tokens of the largest step that costs at most so much, in tokens; 0 where every step costs more."""
    return int(math.sqrt(max(units**2 - fixed_tokens**2, 0.0)))


class Alone:
    """How a prompt is prefilled by itself: its chunks, and what their steps cost.

    A prompt longer than any row begins with chunks as long as those. What is left is one step of the cheapest bucket that holds it, or
    the cheapest steps of smaller ones, largest first, where they and the decode steps between them cost at most `CLEARLY` of that.

    So a prompt never costs more than in whole steps: where several are chosen their sum is at most `CLEARLY` of one step, and whatever
    is chosen for the rest of it later is at most 1 / `CLEARLY` of what was counted.

    Args:
        sizes: tokens of a row, and cost of a step, of each bucket.
        between: cost of what runs between two steps.
    """

    def __init__(self, sizes: Iterable[tuple[int, float]], between: float = 0.0) -> None:
        self._between = between
        # Smallest first, without those that take no less than a larger one.
        self._sizes: list[tuple[int, float]] = []
        for tokens, cost in sorted(sizes, key=lambda size: (-size[0], size[1])):
            if not self._sizes or cost < self._sizes[0][1]:
                self._sizes.insert(0, (tokens, cost))
        self._steps: dict[int, tuple[int, float]] = {}
        self._costs: dict[int, float] = {0: 0.0}

    def chunk(self, left: int) -> int:
        """Tokens that the next step computes of a prompt that has so many left, at least 1."""
        longest = self._sizes[-1][0]
        return longest if left > longest else self._step(left)[0]

    def cost(self, left: int) -> float:
        """Of all its prefill steps."""
        (longest, dearest), total = self._sizes[-1], 0.0
        if left > longest:
            total, left = (left - 1) // longest * dearest, (left - 1) % longest + 1
        ahead = []
        while left not in self._costs:
            tokens, cost = self._step(left)
            ahead.append((left, cost))
            left -= tokens
        rest = self._costs[left]
        for before, cost in reversed(ahead):
            rest += cost
            self._costs[before] = rest
        return total + rest

    def _step(self, left: int) -> tuple[int, float]:
        """Tokens and cost of the next step of a prompt that one step can hold."""
        if left not in self._steps:
            whole = next(cost for tokens, cost in self._sizes if tokens >= left)
            self._steps[left] = self._several(left, whole) or (left, whole)
        return self._steps[left]

    def _several(self, left: int, whole: float) -> tuple[int, float] | None:
        """The largest of the cheapest steps that together cost clearly less than one; None where none do."""
        costs = dict(self._sizes)
        most = CLEARLY * whole
        # Cost of steps, the largest of them (negative, to come first) and the tokens that they hold. The first that hold all are the
        # cheapest. Steps may come in any order, smallest first too: so each begins with one that costs half of all at most.
        ahead = [(cost, -tokens, tokens) for tokens, cost in self._sizes if tokens < left and 2 * cost <= most]
        heapq.heapify(ahead)
        done = set[int]()
        while ahead:
            cost, largest, held = heapq.heappop(ahead)
            if held >= left:
                return -largest, costs[-largest]
            if held in done:
                continue
            done.add(held)
            for tokens, more in self._sizes:
                if (total := cost + self._between + more) <= most:
                    heapq.heappush(ahead, (total, min(largest, -tokens), held + tokens))
        return None


@lru_cache(maxsize=8)
def _alone(sizes: tuple[tuple[int, float], ...], between: float) -> Alone:
    """The same for steps that cost the same, as it remembers what it has found."""
    return Alone(sizes, between)
