"""Turns two executables of one step into a verdict: do live rows agree, whatever lies in padding and unused state?

Everything a live row must not read is NaN: the null page and slot, pages and slots of nobody, and the part of a row's last
page that is not written yet. One leak and a compared value is NaN, which agrees with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..graphs.errors import VerifyError
from ..graphs.types import Bucket, Leaf, Limits, Signature
from ..lowering.executable import Executable

NAN = float("nan")


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
        logits_error: largest measure of logits in any scene.
        state_error: largest measure of any pool's live state in any scene.
        token_mismatches: rows whose greedy tokens differ.
    """

    rows: int
    logits_error: float
    state_error: float
    token_mismatches: int


@dataclass(frozen=True)
class Scene:
    """One poisoned step: operands in signature order, and what is alive in it.

    Attributes:
        rows: live rows.
        pages: (row, page, tokens of it that hold something after the step).
        slots: state slots written by live rows.
    """

    operands: list[torch.Tensor]
    rows: list[int]
    pages: list[tuple[int, int, int]]
    slots: list[int]


def scene(
    bucket: Bucket, signature: Signature, limits: Limits, params: Sequence[torch.Tensor], vocab: int, live: int, generator: torch.Generator
) -> Scene:
    """Random tokens, lengths and history for `live` rows at random places of the batch; NaN elsewhere."""
    B, Q, N, P = bucket.batch, bucket.q_len, limits.pages_per_request, limits.page_size
    rows = sorted(torch.randperm(B, generator=generator)[:live].tolist())
    free_pages = (1 + torch.randperm(limits.num_pages - 1, generator=generator)).tolist()
    free_slots = (1 + torch.randperm(limits.num_slots - 1, generator=generator)).tolist()
    share = min(N, len(free_pages) // max(1, live))
    table = torch.zeros(B, N, dtype=torch.int32)
    starts, lengths = torch.zeros(B, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    read = torch.zeros(B, dtype=torch.int32)
    write = torch.zeros(B, Q if bucket.kind == "decode" else 1, dtype=torch.int32)
    roomy = len(free_slots) >= live * (1 + write.shape[1])
    tokens = torch.zeros(B, Q, dtype=torch.int32)
    pages, slots, histories = [], [], []
    for row in rows:
        count = Q if bucket.kind == "decode" else _random(1, min(Q, share * P), generator)
        start = _random(0, share * P - count, generator)
        own = [free_pages.pop() for _ in range(-(-(start + count) // P))]
        table[row, : len(own)] = torch.tensor(own)
        starts[row], lengths[row] = start, count
        tokens[row, :count] = torch.randint(0, vocab, (count,), generator=generator, dtype=torch.int32)
        targets = [free_slots.pop() for _ in range(write.shape[1])]
        # A runtime without drafts reads and writes one slot; apart, they also show a state that was not moved.
        source = free_slots.pop() if roomy else targets[0]
        read[row], write[row] = source, torch.tensor(targets)
        pages += [(row, page, min(P, start + count - i * P)) for i, page in enumerate(own)]
        histories += [(page, max(0, min(P, start - i * P))) for i, page in enumerate(own)]
        slots += targets
    state = [_pool(leaf, histories, read[rows].tolist(), generator) for leaf in signature.state]
    zeros, ones = torch.zeros(B), torch.ones(B)
    inputs = {
        "tokens": tokens, "starts": starts, "lengths": lengths, "page_table": table, "read_slots": read, "write_slots": write,
        "temperature": zeros, "top_k": zeros.int(), "top_p": ones, "min_p": zeros, "uniform": torch.zeros(write.shape),
    }  # fmt: skip
    return Scene([*params, *state, *(inputs[_short(leaf)] for leaf in signature.inputs)], rows, pages, slots)


def _pool(
    leaf: Leaf, histories: list[tuple[int, int]], slots: list[int], generator: torch.Generator
) -> torch.Tensor:
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


def compare(
    reference: Executable,
    candidate: Executable,
    scenes: Sequence[Scene],
    signature: Signature,
    measure: Callable[[torch.Tensor, torch.Tensor], float] | None = None,
) -> Verdict:
    """Runs both on copies of each scene's state and measures every live value; by `difference` unless said otherwise."""
    measure = measure or difference
    rows = mismatches = 0
    logits_error = state_error = 0.0
    for one in scenes:
        ours, theirs = _copy_state(one, signature), _copy_state(one, signature)
        expected = dict(zip((_short(leaf) for leaf in signature.outputs), reference(ours), strict=True))
        found = dict(zip((_short(leaf) for leaf in signature.outputs), candidate(theirs), strict=True))
        rows += len(one.rows)
        mismatches += sum(not torch.equal(expected["tokens"][row], found["tokens"][row]) for row in one.rows)
        logits_error = max(logits_error, measure(expected["logits"][one.rows], found["logits"][one.rows]))
        first = len(signature.params)
        for i, leaf in enumerate(signature.state):
            a, b = ours[first + i], theirs[first + i]
            state_error = max(state_error, measure(*_live_values(leaf, one, a, b)))
    return Verdict(rows, logits_error, state_error, mismatches)


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


def _live_values(leaf: Leaf, one: Scene, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if is_paged(leaf):
        places = [(page, slice(0, used)) for _, page, used in one.pages]
        return torch.cat([a[at].flatten() for at in places]), torch.cat([b[at].flatten() for at in places])
    return a[one.slots], b[one.slots]


def _copy_state(one: Scene, signature: Signature) -> list[torch.Tensor]:
    first, last = len(signature.params), len(signature.params) + len(signature.state)
    return [t.clone() if first <= i < last else t for i, t in enumerate(one.operands)]


def _random(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def _short(leaf: Leaf) -> str:
    return leaf.name.split(".", 1)[1]


TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-5, True, difference),
    # A router that rounds the other way sends a token to another expert, and single values then differ by several percent: in
    # bfloat16 only an average says whether a kernel is right. A wrong one is off by the size of the values, a leak by NaN.
    torch.bfloat16: Tolerance(0.2, 0.2, False, deviation),
}
"""What the proof allows, by computing dtype."""
