"""Turns two executables of one step into a verdict: do live rows agree, whatever lies in padding and unused state?

Everything a live row must not read is NaN: the null page and slot, pages and slots of nobody, and the part of a row's last
page that is not written yet. One leak and a compared value is NaN, which agrees with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...graphs.errors import VerifyError
from ...graphs.types import Bucket, Leaf, Limits, Signature
from ...lowering.executable import Executable
from ...models import request_slots

NAN = float("nan")
TOKENS = ("tokens", "counts", "drafts")
LOGITS = ("logits", "chosen_logprobs", "top_logprobs")


@dataclass(frozen=True)
class Tolerance:
    """Largest differences allowed between two executables.

    Attributes:
        logits, state: largest legal measure of the logits and of each state pool.
        tokens: whether greedy tokens must be equal.
        measure: `difference` or `deviation`.
    """

    logits: float
    state: float
    tokens: bool
    measure: Callable[[torch.Tensor, torch.Tensor], float]


@dataclass(frozen=True)
class Verdict:
    """What was measured over all scenes of one bucket.

    Attributes:
        rows: live rows compared.
        logits_error: largest measure of logits, or of log probabilities, in any scene.
        state_error: largest measure of any pool's live state in any scene.
        token_mismatches: rows whose greedy tokens, drafts, or counts of accepted drafts differ.
    """

    rows: int = 0
    logits_error: float = 0.0
    state_error: float = 0.0
    token_mismatches: int = 0

    def worse(self, other: Verdict) -> Verdict:
        """Of both together."""
        return Verdict(
            self.rows + other.rows,
            max(self.logits_error, other.logits_error),
            max(self.state_error, other.state_error),
            self.token_mismatches + other.token_mismatches,
        )


@dataclass(frozen=True)
class Live:
    """One live row of a scene.

    Attributes:
        row, seat: where it lies in the batch, and where its next step is kept.
        start, count: tokens before the step, and in it.
        pages: its pages, with room for what it drafts.
        slots: state slots it writes.
        read: the one it starts from.
    """

    row: int
    seat: int
    start: int
    count: int
    pages: list[int]
    slots: list[int]
    read: int

    def held(self, tokens: int, page_size: int) -> list[tuple[int, int]]:
        """(page, tokens of it) that hold so many tokens from the request's first on."""
        return [(page, max(0, min(page_size, tokens - i * page_size))) for i, page in enumerate(self.pages)]


@dataclass(frozen=True)
class Scene:
    """One poisoned step: operands in signature order, and what is alive in it."""

    operands: list[torch.Tensor]
    live: list[Live]

    @property
    def rows(self) -> list[int]:
        """Live rows."""
        return [one.row for one in self.live]


def scene(
    bucket: Bucket, signature: Signature, limits: Limits, params: Sequence[torch.Tensor], vocab: int, live: int, generator: torch.Generator
) -> Scene:
    """Random tokens, lengths and history for `live` rows at random places of the batch; NaN elsewhere."""
    rows = _rows(bucket, limits, live, generator)
    tokens = torch.randint(0, vocab, (bucket.batch, bucket.q_len), generator=generator, dtype=torch.int32)
    histories = [place for one in rows for place in one.held(one.start, limits.page_size)]
    state = [_pool(leaf, histories, [one.read for one in rows], generator) for leaf in signature.state]
    for leaf, pool in zip(signature.state, state, strict=True):
        if is_seats(leaf) and bucket.kind == "decode":
            for one in rows:
                pool[one.seat, request_slots.START], pool[one.seat, request_slots.ACCEPTED] = one.start, one.slots.index(one.read)
                pool[one.seat, request_slots.TOKENS :] = tokens[one.row]
    inputs = _inputs(bucket, limits, rows, tokens, vocab, generator)
    return Scene([*params, *state, *(inputs[leaf.path] for leaf in signature.inputs)], rows)


def _rows(bucket: Bucket, limits: Limits, live: int, generator: torch.Generator) -> list[Live]:
    """Live rows that share pages, slots and seats with nobody."""
    decode, Q, P = bucket.kind == "decode", bucket.q_len, limits.page_size
    free_pages = (1 + torch.randperm(limits.num_pages - 1, generator=generator)).tolist()
    free_slots = (1 + torch.randperm(limits.num_slots - 1, generator=generator)).tolist()
    free_seats = (1 + torch.randperm(limits.num_seats - 1, generator=generator)).tolist()
    width, share = (Q if decode else 1), min(limits.pages_per_request, len(free_pages) // max(1, live))
    # A prefill reads and writes one slot; apart, they also show a state that was not moved.
    apart = not decode and len(free_slots) >= 2 * live
    found = []
    for row in sorted(torch.randperm(bucket.batch, generator=generator)[:live].tolist()):
        ahead = 2 * limits.drafts
        count = Q if decode else _random(1, max(1, min(Q, share * P - ahead)), generator)
        start = _random(0 if not decode else 1, max(1, share * P - count - ahead), generator)
        own = [free_pages.pop() for _ in range(min(share, -(-(start + count + ahead) // P)))]
        slots = [free_slots.pop() for _ in range(width)]
        read = free_slots.pop() if apart else slots[_random(0, width - 1, generator)]
        found.append(Live(row, free_seats.pop(), start, count, own, slots, read))
    return found


def _inputs(
    bucket: Bucket, limits: Limits, rows: list[Live], tokens: torch.Tensor, vocab: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Every input that a bucket of any artifact may have."""
    B, i32 = bucket.batch, torch.int32
    decode = bucket.kind == "decode"
    integers = ("starts", "lengths", "read_slots", "seats", "drafts", "base", "top_k", "logprobs")
    inputs = {name: torch.zeros(B, dtype=i32) for name in integers}
    inputs |= {name: torch.zeros(B) for name in ("temperature", "min_p")} | {"top_p": torch.ones(B)}
    inputs |= {"tokens": torch.zeros_like(tokens), "next_tokens": torch.full((B,), -1, dtype=i32)}
    inputs |= {
        "page_table": torch.zeros(B, limits.pages_per_request, dtype=i32),
        "write_slots": torch.zeros(B, bucket.q_len if decode else 1, dtype=i32),
        "uniform": torch.zeros(B, 2 * bucket.q_len - 1 if decode else 1),
    }
    for one in rows:
        inputs["tokens"][one.row, : one.count] = tokens[one.row, : one.count]
        inputs["page_table"][one.row, : len(one.pages)] = torch.tensor(one.pages)
        inputs["write_slots"][one.row] = torch.tensor(one.slots)
        told = {"starts": one.start, "lengths": one.count, "read_slots": one.read, "seats": one.seat, "drafts": limits.drafts}
        told |= {"base": one.start, "logprobs": one.row % 2, "next_tokens": _random(-1, vocab - 1, generator)}
        for name, value in told.items():
            inputs[name][one.row] = value
    return inputs


def _pool(leaf: Leaf, histories: list[tuple[int, int]], slots: list[int], generator: torch.Generator) -> torch.Tensor:
    if is_seats(leaf):
        return torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype)
    pool = torch.full(leaf.aval.shape, NAN, dtype=leaf.aval.dtype)
    if is_paged(leaf):
        for page, used in histories:
            pool[page, :used] = torch.randn(used, *pool.shape[2:], generator=generator).to(pool.dtype)
    else:
        for slot in slots:
            pool[slot] = (0.3 * torch.randn(pool.shape[1:], generator=generator)).to(pool.dtype)
    return pool


def is_paged(leaf: Leaf) -> bool:
    """Whether a state leaf is a pool of pages (else of slots)."""
    return leaf.aval.axes[0] == "pages"


def is_seats(leaf: Leaf) -> bool:
    """Whether a state leaf is the pool of seats."""
    return leaf.aval.axes[0] == "seats"


def force(reference: Executable, one: Scene, signature: Signature) -> None:
    """Makes drafts of a decode scene right, so many in each live row that every count of accepted drafts occurs in turn.

    What a draft must be to be accepted depends on those before it, so the reference runs once for each place.
    """
    at = next(i for i, leaf in enumerate(signature.state) if is_seats(leaf))
    pool = one.operands[len(signature.params) + at]
    names = [leaf.path for leaf in signature.outputs]
    for place in range(pool.shape[1] - request_slots.TOKENS - 1):
        sampled = dict(zip(names, reference(_copy_state(one, signature)), strict=True))["tokens"]
        for i, live in enumerate(one.live):
            if i % sampled.shape[1] > place:
                pool[live.seat, request_slots.TOKENS + 1 + place] = sampled[live.row, place]


def compare(
    reference: Executable,
    candidate: Executable,
    scenes: Sequence[Scene],
    signature: Signature,
    measure: Callable[[torch.Tensor, torch.Tensor], float] | None = None,
) -> Verdict:
    """Runs both on copies of each scene's state and measures every live value; by `difference` unless said otherwise."""
    first, last = len(signature.params), len(signature.params) + len(signature.state)
    names = [leaf.path for leaf in signature.outputs]
    found = Verdict()
    for one in scenes:
        ours, theirs = _copy_state(one, signature), _copy_state(one, signature)
        expected, said = (dict(zip(names, run(own), strict=True)) for run, own in ((reference, ours), (candidate, theirs)))
        pools = [(leaf, ours[first:last][i], theirs[first:last][i]) for i, leaf in enumerate(signature.state)]
        found = found.worse(verdict(one, expected, said, pools, measure or difference))
    return found


def verdict(
    one: Scene,
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    pools: Sequence[tuple[Leaf, torch.Tensor, torch.Tensor]],
    measure: Callable[[torch.Tensor, torch.Tensor], float],
) -> Verdict:
    """What two runs of one scene gave, compared where it is alive.

    Args:
        expected, found: outputs by name.
        pools: each state leaf with its pool after either run.
    """
    # What follows from a token is compared where the token is the same.
    same = [row for row in one.rows if all(torch.equal(expected[name][row], found[name][row]) for name in TOKENS if name in expected)]
    logits_error = state_error = 0.0
    for name in (name for name in LOGITS if name in expected):
        rows = one.rows if name == "logits" else same
        logits_error = max(logits_error, measure(expected[name][rows], found[name][rows]))
    for leaf, a, b in pools:
        live = one.live if _is_models(leaf) else [live for live in one.live if live.row in same]
        counts = None if _is_models(leaf) else expected.get("counts")
        state_error = max(state_error, measure(*(_live_values(leaf, live, pool, counts) for pool in (a, b))))
    return Verdict(len(one.rows), logits_error, state_error, len(one.rows) - len(same))


def judge(verdict: Verdict, tolerance: Tolerance, what: str) -> Verdict:
    """Passes a verdict on, or refuses it.

    Raises:
        VerifyError: naming what was compared, the measure, its value and the largest legal one.
    """
    for name, value, limit in (
        ("logits", verdict.logits_error, tolerance.logits),
        ("state", verdict.state_error, tolerance.state),
        ("tokens", float(verdict.token_mismatches), 0.0 if tolerance.tokens else float("inf")),
    ):
        if not value <= limit:
            raise VerifyError(f"{what}: {name} differ by {value:.3g}; legal is at most {limit:.3g} ({verdict.rows} rows compared)")
    return verdict


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


def _is_models(leaf: Leaf) -> bool:
    """Whether a pool is of the model's own layers: filled with all candidates of a step, whichever of them count."""
    return leaf.path.startswith("layers.")


def _live_values(leaf: Leaf, live: Sequence[Live], pool: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """What a pool holds of live rows; with `counts` [B], no more than the tokens of the step that count."""
    if is_seats(leaf):
        return pool[[one.seat for one in live]]
    if not is_paged(leaf):
        return pool[[slot for one in live for slot in one.slots]]
    ends = {one.row: one.start + (one.count if counts is None else int(counts[one.row])) for one in live}
    kept = [pool[page, :used].flatten() for one in live for page, used in one.held(ends[one.row], leaf.aval.shape[1])]
    return torch.cat(kept) if kept else pool.new_zeros(0)


def _copy_state(one: Scene, signature: Signature) -> list[torch.Tensor]:
    first, last = len(signature.params), len(signature.params) + len(signature.state)
    return [t.clone() if first <= i < last else t for i, t in enumerate(one.operands)]


def _random(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


TOLERANCES = {
    # The draft head's keys come after the rounding of all layers.
    torch.float32: Tolerance(1e-5, 4e-5, True, difference),
    # A router that rounds the other way sends a token to another expert, and single values then differ by several percent: in
    # bfloat16 only an average says whether a kernel is right. A wrong one is off by the size of the values, a leak by NaN.
    torch.bfloat16: Tolerance(0.2, 0.2, False, deviation),
}
"""What the proof allows, by computing dtype."""
