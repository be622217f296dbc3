"""Comparing two executables of one step on inputs in which everything that no live row may read is NaN.

NaN fills the null page and slot, pages and slots that no request owns, and the part of a row's last page that is not written yet. If
any of it leaks into a live row, a compared value becomes NaN, and NaN agrees with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...graphs.errors import VerifyError
from ...graphs.step_inputs import STEP_INPUTS, StepInputs
from ...graphs.types import Bucket, Leaf, Limits, Signature
from ...lowering.executable import Executable
from ...models import request_slots
from . import poison

NAN = float("nan")
TOKENS = ("tokens", "counts", "drafts")
LOGITS = ("logits", "chosen_logprobs", "top_logprobs")


@dataclass(frozen=True)
class Tolerance:
    """Largest differences allowed between two executables.

    Attributes:
        logits, state: bound on the measure of the logits and of each state pool.
        tokens: whether greedy tokens must be equal.
        measure: `difference` or `deviation`.
    """

    logits: float
    state: float
    tokens: bool
    measure: Callable[[torch.Tensor, torch.Tensor], float]


@dataclass(frozen=True)
class Differences:
    """Differences between two executables over all test cases of one bucket.

    Attributes:
        rows: live rows compared.
        logits_error: largest measure of logits, or of log probabilities, in any case.
        state_error: largest measure of any pool's live state in any case.
        token_mismatches: rows whose greedy tokens, drafts, or counts of accepted drafts differ.
    """

    rows: int = 0
    logits_error: float = 0.0
    state_error: float = 0.0
    token_mismatches: int = 0

    def combined(self, other: Differences) -> Differences:
        """The differences of both sets of cases together."""
        return Differences(
            self.rows + other.rows,
            max(self.logits_error, other.logits_error),
            max(self.state_error, other.state_error),
            self.token_mismatches + other.token_mismatches,
        )


@dataclass(frozen=True)
class LiveRow:
    """One live row of a test case.

    Attributes:
        row: index in the batch.
        request_slot: the request slot that keeps what its next step starts from.
        start, count: tokens in the cache before the step, and new tokens in it.
        pages: its pages, with room for drafts.
        slots: state slots it writes.
        read: the state slot it starts from.
    """

    row: int
    request_slot: int
    start: int
    count: int
    pages: list[int]
    slots: list[int]
    read: int

    def filled_pages(self, tokens: int, page_size: int) -> list[tuple[int, int]]:
        """(page, tokens in it) of the request's first `tokens` tokens."""
        return [(page, max(0, min(page_size, tokens - i * page_size))) for i, page in enumerate(self.pages)]


@dataclass(frozen=True)
class PoisonedStep:
    """A test case: operands of one step in signature order, and its live rows; all that these must not read is NaN."""

    operands: list[torch.Tensor]
    live: list[LiveRow]

    @property
    def rows(self) -> list[int]:
        """Indices of the live rows in the batch."""
        return [row.row for row in self.live]


def poisoned_step(
    bucket: Bucket, signature: Signature, limits: Limits, params: Sequence[torch.Tensor], vocab: int, live: int, generator: torch.Generator
) -> PoisonedStep:
    """A step with random tokens, lengths and cached state for `live` rows at random places of the batch, and NaN elsewhere."""
    rows = _random_rows(bucket, limits, live, generator)
    tokens = torch.randint(0, vocab, (bucket.batch, bucket.q_len), generator=generator, dtype=torch.int32)
    filled = [page for row in rows for page in row.filled_pages(row.start, limits.page_size)]
    state = [_random_pool(leaf, filled, [_slot_read(leaf, row) for row in rows], generator) for leaf in signature.state]
    for leaf, pool in zip(signature.state, state, strict=True):
        if is_request_slots(leaf) and bucket.kind == "decode":
            for row in rows:
                pool[row.request_slot, request_slots.START], pool[row.request_slot, request_slots.ACCEPTED] = (
                    row.start,
                    row.slots.index(row.read),
                )
                pool[row.request_slot, request_slots.TOKENS :] = tokens[row.row]
    inputs = _inputs(bucket, limits, rows, tokens, vocab, generator)
    return PoisonedStep([*params, *state, *(inputs[leaf.path] for leaf in signature.inputs)], rows)


def _random_rows(bucket: Bucket, limits: Limits, live: int, generator: torch.Generator) -> list[LiveRow]:
    """Live rows none of which share a page, state slot or request slot."""
    decode, Q, P = bucket.kind == "decode", bucket.q_len, limits.page_size
    free_pages = (1 + torch.randperm(limits.num_pages - 1, generator=generator)).tolist()
    free_slots = (1 + torch.randperm(limits.num_slots - 1, generator=generator)).tolist()
    free_request_slots = (1 + torch.randperm(limits.num_request_slots - 1, generator=generator)).tolist()
    width, most_pages = (Q if decode else 1), min(limits.pages_per_request, len(free_pages) // max(1, live))
    # A prefill reads and writes the same slot when served; with two slots a state that was not written shows as NaN.
    separate = not decode and len(free_slots) >= 2 * live
    rows = []
    for row in sorted(torch.randperm(bucket.batch, generator=generator)[:live].tolist()):
        ahead = 2 * limits.drafts
        count = Q if decode else _random(1, max(1, min(Q, most_pages * P - ahead)), generator)
        start = _random(0 if not decode else 1, max(1, most_pages * P - count - ahead), generator)
        pages = [free_pages.pop() for _ in range(min(most_pages, -(-(start + count + ahead) // P)))]
        slots = [free_slots.pop() for _ in range(width)]
        read = free_slots.pop() if separate else slots[_random(0, width - 1, generator)]
        rows.append(LiveRow(row, free_request_slots.pop(), start, count, pages, slots, read))
    return rows


def _inputs(
    bucket: Bucket, limits: Limits, rows: list[LiveRow], tokens: torch.Tensor, vocab: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Every input that a bucket of any artifact may have, by name."""
    inputs = StepInputs(bucket, limits).padding([field.name for field in STEP_INPUTS])
    for row in rows:
        inputs["tokens"][row.row, : row.count] = tokens[row.row, : row.count]
        inputs["page_table"][row.row, : len(row.pages)] = torch.tensor(row.pages)
        inputs["state_slots_out"][row.row] = torch.tensor(row.slots)
        scalars = {
            "num_computed_tokens": row.start,
            "query_lens": row.count,
            "state_slots_in": row.read,
            "request_slots": row.request_slot,
            "drafts": limits.drafts,
        }
        scalars |= {"base": row.start, "logprobs": row.row % 2, "next_tokens": _random(-1, vocab - 1, generator)}
        for name, value in scalars.items():
            inputs[name][row.row] = value
    masks = inputs["bitmask"]
    for place, row in enumerate(rows[::2][: len(masks)]):
        inputs["bitmask_rows"][row.row] = place + 1
        masks[place] = torch.randint(-(2**31), 2**31, masks[place].shape, generator=generator, dtype=torch.int64).to(torch.int32)
    adjust(inputs, [row.row for row in rows[1::2]], generator)
    return inputs


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
            seen[sets] = torch.randint(-(2**31), 2**31, seen[sets].shape, generator=generator, dtype=torch.int64).to(torch.int32)


def _random_pool(leaf: Leaf, filled: list[tuple[int, int]], slots: list[int], generator: torch.Generator) -> torch.Tensor:
    """A state pool with random values in what is filled: (page, tokens in it), or slots."""
    if is_request_slots(leaf):
        return torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype)
    pool = poison.filled(leaf.aval.shape, unread_value(leaf), leaf.aval.dtype)
    if is_paged(leaf):
        for page, used in filled:
            tokens = tokens_second(leaf, pool)[page, :used]
            tokens.copy_(random_cache(leaf, tokens.shape, generator))
    else:
        for slot in slots:
            pool[slot] = (0.3 * torch.randn(pool.shape[1:], generator=generator)).to(pool.dtype)
    return pool


def is_paged(leaf: Leaf) -> bool:
    """Whether a state leaf is a pool of pages."""
    return leaf.aval.axes[0] == "pages"


def holds_scales(leaf: Leaf) -> bool:
    """Whether a state leaf has the scales of cached int8, [pages, heads, tokens] (ops/quant_cache_write.py)."""
    return is_paged(leaf) and leaf.aval.axes[1] == "kv_heads"


def tokens_second(leaf: Leaf, pool: torch.Tensor) -> torch.Tensor:
    """A pool of pages, with the tokens of a page in dimension 1 and heads in dimension 2."""
    return pool.transpose(1, 2) if holds_scales(leaf) else pool


def unread_value(leaf: Leaf) -> float:
    """What fills the places that no live row may read: NaN, or an integer that no rounding by a largest value gives."""
    return NAN if leaf.aval.dtype.is_floating_point else -128


def random_cache(leaf: Leaf, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Cached values as a model writes them: about one in size, in integers times scales where the cache is int8."""
    if leaf.aval.dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    if holds_scales(leaf):
        return (1 + torch.rand(shape, generator=generator)) / 127
    return torch.randn(shape, generator=generator).to(leaf.aval.dtype)


def rounds_caches(leaves: Iterable[Leaf]) -> bool:
    """Whether a state leaf caches int8."""
    return any(leaf.aval.dtype == torch.int8 for leaf in leaves)


def _slot_read(leaf: Leaf, row: LiveRow) -> int:
    """The slot of a pool that a row's step reads."""
    return row.slots[0] if keeps_first_slots(leaf) and len(row.slots) > 1 else row.read


def keeps_first_slots(leaf: Leaf) -> bool:
    """Whether a state leaf is a pool that keeps all of a request in the first of its slots (ops/causal_conv.py)."""
    return leaf.aval.axes[0] == "first_slots"


def is_request_slots(leaf: Leaf) -> bool:
    """Whether a state leaf is the pool of request slots."""
    return leaf.aval.axes[0] == "request_slots"


def plant_drafts(reference: Executable, case: PoisonedStep, signature: Signature) -> None:
    """Replaces drafts of a decode case by right ones: in the i-th live row the first i modulo k+1, so that all counts occur.

    Which draft is right depends on those before it, so the reference runs once for each of the k places.
    """
    index = next(i for i, leaf in enumerate(signature.state) if is_request_slots(leaf))
    pool = case.operands[len(signature.params) + index]
    for place in range(pool.shape[1] - request_slots.TOKENS - 1):
        sampled = _run(reference, case, signature)[0]["tokens"]
        for i, live in enumerate(case.live):
            if i % sampled.shape[1] > place:
                pool[live.request_slot, request_slots.TOKENS + 1 + place] = sampled[live.row, place]


def compare(
    reference: Executable,
    candidate: Executable,
    cases: Sequence[PoisonedStep],
    signature: Signature,
    measure: Callable[[torch.Tensor, torch.Tensor], float] | None = None,
) -> Differences:
    """Runs both on each case's state and measures every live value, by `difference` unless another measure is given."""
    differences = Differences()
    for case in cases:
        (expected, left), (actual, right) = _run(reference, case, signature), _run(candidate, case, signature)
        pools = list(zip(signature.state, left, right, strict=True))
        differences = differences.combined(output_differences(case, expected, actual, pools, measure or difference))
    return differences


def output_differences(
    case: PoisonedStep,
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    pools: Sequence[tuple[Leaf, torch.Tensor, torch.Tensor]],
    measure: Callable[[torch.Tensor, torch.Tensor], float],
) -> Differences:
    """Differences between the live values of two runs of one case.

    Args:
        expected, actual: outputs by name.
        pools: each state leaf with its pool after either run.
    """
    # Values that depend on a token are compared only in rows whose tokens agree.
    same = [row for row in case.rows if all(torch.equal(expected[name][row], actual[name][row]) for name in TOKENS if name in expected)]
    logits_error = state_error = 0.0
    for name in (name for name in LOGITS if name in expected):
        rows = case.rows if name == "logits" else same
        logits_error = max(logits_error, measure(expected[name][rows], actual[name][rows]))
    for leaf, left, right in pools:
        live = case.live if _of_main_layers(leaf) else [row for row in case.live if row.row in same]
        counts = None if _of_main_layers(leaf) else expected.get("counts")
        state_error = max(state_error, measure(*(_live_values(leaf, live, pool, counts) for pool in (left, right))))
    return Differences(len(case.rows), logits_error, state_error, len(case.rows) - len(same))


def check_tolerance(differences: Differences, tolerance: Tolerance, what: str) -> Differences:
    """Returns differences that are within a tolerance.

    Raises:
        VerifyError: naming what was compared, the measure, its value and the largest legal one.
    """
    for name, value, limit in (
        ("logits", differences.logits_error, tolerance.logits),
        ("state", differences.state_error, tolerance.state),
        ("tokens", float(differences.token_mismatches), 0.0 if tolerance.tokens else float("inf")),
    ):
        if not value <= limit:
            raise VerifyError(f"{what}: {name} differ by {value:.3g}; legal is at most {limit:.3g} ({differences.rows} rows compared)")
    return differences


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference over the larger of 1 and the largest |a|; infinite where either holds a NaN."""
    if a.numel() == 0:
        return 0.0
    a, b = a.float(), b.float()
    if bool(torch.isnan(a).any()) or bool(torch.isnan(b).any()):
        return float("inf")
    return float((a - b).abs().max() / a.abs().max().clamp(min=1.0))


def deviation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of the difference over that of a; infinite where either holds a NaN."""
    if a.numel() == 0:
        return 0.0
    a, b = a.float(), b.float()
    if bool(torch.isnan(a).any()) or bool(torch.isnan(b).any()):
        return float("inf")
    return float((a - b).pow(2).mean().sqrt() / a.pow(2).mean().sqrt().clamp(min=1e-12))


def _of_main_layers(leaf: Leaf) -> bool:
    """Whether a pool belongs to the model's own layers, which write all candidates of a step, accepted or not."""
    return leaf.path.startswith("layers.")


def _live_values(leaf: Leaf, live: Sequence[LiveRow], pool: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Values of live rows in a pool, flat; with `counts` [B] only those of accepted tokens."""
    if is_request_slots(leaf):
        return pool[[row.request_slot for row in live]]
    if not is_paged(leaf):
        return pool[[slot for row in live for slot in (row.slots[:1] if keeps_first_slots(leaf) else row.slots)]]
    ends = {row.row: row.start + (row.count if counts is None else int(counts[row.row])) for row in live}
    cached = tokens_second(leaf, pool)
    filled = [cached[page, :used].flatten() for row in live for page, used in row.filled_pages(ends[row.row], cached.shape[1])]
    return torch.cat(filled) if filled else pool.new_zeros(0)


def _run(executable: Executable, case: PoisonedStep, signature: Signature) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Outputs by name, and pools that have what the step left where it may write; the case's own pools are afterwards what they were.

    Only those places are copied. Pools are made for all requests that are served at once, gigabytes of a large model: what the results
    do not hold of them is memory that nobody writes, which the kernel never gives.
    """
    first = len(signature.params)
    pools = case.operands[first : first + len(signature.state)]
    places = [_written_places(leaf, case.live) for leaf in signature.state]
    before = [pool[at] for pool, at in zip(pools, places, strict=True)]
    outputs = executable(case.operands)
    after = [torch.empty_like(pool) for pool in pools]
    for pool, at, was, left in zip(pools, places, before, after, strict=True):
        left[at] = pool[at]
        pool[at] = was
    return dict(zip((leaf.path for leaf in signature.outputs), outputs, strict=True)), after


def _written_places(leaf: Leaf, live: Sequence[LiveRow]) -> list[int]:
    """The null place of a pool, which rows of padding write, and those of the live rows."""
    if is_request_slots(leaf):
        return [0, *(row.request_slot for row in live)]
    return [0, *(place for row in live for place in (row.pages if is_paged(leaf) else row.slots))]


def _random(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


TOLERANCES = {
    # State is allowed more than logits: the draft head's keys accumulate the rounding of all layers.
    torch.float32: Tolerance(1e-5, 4e-5, True, difference),
    # A router that rounds the other way sends a token to another expert, so that single values differ by several percent: in bfloat16
    # only an average can show that a kernel is right. A wrong kernel is off by the size of the values, a leak gives NaN.
    torch.bfloat16: Tolerance(0.2, 0.2, False, deviation),
}
"""Allowed differences by computing dtype."""

ROUNDED = Tolerance(0.02, 0.02, False, difference)
"""Allowed in float32 where caches are int8: a value between two integers may be rounded the other way, one part in 127."""

ROUNDED_ACTIVATIONS = Tolerance(0.5, 0.5, False, deviation)
"""Allowed in bfloat16 where products read activations in int8: what the last bit of a bfloat16 changes, rounding to 127 steps makes
larger. A model of 24 layers with random weights is off by 0.12 to 0.37, and by 0.05 to 0.09 without int8."""


def tolerance_of(dtype: torch.dtype, signature: Signature) -> Tolerance:
    """Allowed differences of a graph that computes in a dtype."""
    if dtype == torch.float32:
        return ROUNDED if rounds_caches(signature.state) else TOLERANCES[dtype]
    # Only weights that meet activations in int8 are int8: those of W4A16 are packed into int32.
    return ROUNDED_ACTIVATIONS if any(leaf.aval.dtype == torch.int8 for leaf in signature.params) else TOLERANCES[dtype]
