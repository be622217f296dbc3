"""Compares what two runs computed: two executables of one step, or a device and the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...graphs.errors import VerifyError
from ...graphs.ops.packed_latents import parts_of, unpacked
from ...graphs.types import Leaf
from .poisoned_steps import LiveRow, PoisonedStep
from .pools import filled_pages, is_paged, is_picture_pool, is_request_slots, keeps_first_slots, tokens_second
from .tolerances import DEVIATION, INT8_STEPS, INTEGERS, RELATIVE, Measure, Pairs, Tolerance, together

TOKENS = ("tokens", "counts", "drafts")
LOGITS = ("logits", "chosen_logprobs", "top_logprobs")


@dataclass(frozen=True)
class Differences:
    """Differences between two executables.

    Attributes:
        logits: of each live row that was compared the largest measure of its logits and log probabilities.
        state: of each the largest measure of its state in any pool, rows of pictures among them.
        token_mismatches: rows whose greedy tokens, drafts, or counts of accepted drafts differ.
    """

    logits: tuple[float, ...] = ()
    state: tuple[float, ...] = ()
    token_mismatches: int = 0

    def __add__(self, other: Differences) -> Differences:
        """Of the rows of both."""
        return Differences(self.logits + other.logits, self.state + other.state, self.token_mismatches + other.token_mismatches)

    def measured(self, measure: Measure) -> dict[str, float]:
        """What is told of them: rows, logits_error, state_error, token_mismatches."""
        errors = {"logits_error": together(measure, self.logits), "state_error": together(measure, self.state)}
        return {"rows": float(len(self.state)), **errors, "token_mismatches": float(self.token_mismatches)}


def differences_of(
    case: PoisonedStep,
    expected: Mapping[str, Mapping[int, torch.Tensor]],
    actual: Mapping[str, torch.Tensor],
    after: Sequence[tuple[Leaf, torch.Tensor]],
    values: Callable[[int, LiveRow, bool], Pairs],
    measure: Measure,
) -> Differences:
    """Differences between the live values of two runs of one case.

    State is infinitely wrong where a step writes what no row may, or says that rows of a picture are not finite.

    Args:
        expected, actual: outputs by name, those expected of each live row; of those as wide as a chunk its tokens are compared.
        after: each state leaf with the pool that the second run left.
        values: those of a live row in the pool at a position, as either run left them, and on request only those of accepted tokens.
    """
    kind, counts = case.kind, {live.row: live.count for live in case.live}

    def pair(name: str, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = kind.live(name, counts[row])
        return expected[name][row][own], actual[name][row][own]

    stray = any(_has_strays(case, leaf, pool) for leaf, pool in after)
    written = {position: leaf for position, (leaf, _) in enumerate(after) if leaf.aval.axes[0] in case.kind.writes}
    # Values that depend on a token are compared only in rows whose tokens agree.
    same = {row for row in case.rows if all(torch.equal(*pair(name, row)) for name in TOKENS if name in expected)}
    logits, state = list[float](), list[float]()
    for live in case.live:
        row, names = live.row, [name for name in LOGITS if name in expected and (name == "logits" or live.row in same)]
        logits.append(max((measure([pair(name, row)]) for name in names), default=0.0))
        # Whether a pool belongs to the model's own layers, which write all candidates of a step, accepted or not.
        main = {position: leaf.path.startswith("layers.") for position, leaf in written.items()}
        compared = [position for position, own in main.items() if own or row in same]
        error = max((measure(values(position, live, not main[position])) for position in compared), default=0.0)
        broken = "finite" in expected and expected["finite"][row] != actual["finite"][row]
        state.append(math.inf if stray or broken else error)
    return Differences(tuple(logits), tuple(state), len(case.rows) - len(same))


def check_tolerance(differences: Differences, tolerance: Tolerance, what: str) -> dict[str, float]:
    """What is told of differences that are within a tolerance, as `Differences.measured`.

    Raises:
        VerifyError: naming what was compared, the measure, its value and the largest legal one.
    """
    measured = differences.measured(tolerance.measure)
    for name, key, limit in (
        ("logits", "logits_error", tolerance.logits),
        ("state", "state_error", tolerance.state),
        ("tokens", "token_mismatches", 0.0 if tolerance.tokens else float("inf")),
    ):
        if not measured[key] <= limit:
            raise VerifyError(
                f"{what}: {name} differ by {measured[key]:.3g}; legal is at most {limit:.3g} ({measured['rows']:.0f} rows compared)"
            )
    return measured


def _has_strays(case: PoisonedStep, leaf: Leaf, pool: torch.Tensor) -> bool:
    """Whether a place holds something that no live row writes: in pools that steps of the kind do not read, so that all places were NaN."""
    if leaf.aval.axes[0] in case.kind.reads or not (written := case.written(leaf)):
        return False
    return not bool(pool[sorted({*range(len(pool))} - {*written})].isnan().all())


def live_values(leaf: Leaf, row: LiveRow, pool: torch.Tensor, accepted: int | None = None) -> list[torch.Tensor]:
    """Values of a live row in a pool that its step writes, in parts; on request only those of so many tokens."""
    if is_picture_pool(leaf) or is_request_slots(leaf):
        return [pool[row.of(leaf)]]
    if keeps_first_slots(leaf):
        # The last inputs are those of tokens that only longer steps have.
        return [pool[slot, : pool.shape[1] - len(row.unwritten)] for slot in row.slots[:1]]
    if not is_paged(leaf):
        return [pool[slot : slot + 1] for slot in row.slots]
    end, cached = row.start + (row.count if accepted is None else accepted), tokens_second(leaf, pool)
    filled = [cached[page, :used] for page, used in filled_pages(row.pages, end, cached.shape[1])]
    if filled and (parts := parts_of(leaf.aval.axes[-1])) is not None:
        # Bytes of floats are no measure of what they differ by.
        return [torch.cat([part.float() for part in unpacked(torch.cat(filled), *parts)], -1)]
    return [torch.cat(filled)] if filled else []


@dataclass(frozen=True)
class Mismatch:
    """Where two tensors differ most.

    Attributes:
        count: elements that differ by more than is allowed.
        of: elements that are compared.
        error: of the worst element, over what is allowed; infinite where one of both is not finite.
    """

    count: int
    of: int
    index: tuple[int, ...]
    expected: float
    actual: float
    error: float

    def __str__(self) -> str:
        where = ",".join(map(str, self.index))
        return f"{self.count} of {self.of} values differ; at [{where}] the device has {self.actual:.6g}, the CPU {self.expected:.6g}"


def mismatch(expected: torch.Tensor, actual: torch.Tensor) -> Mismatch | None:
    """The worst difference beyond the tolerance of the dtype; None where there is none.

    What the CPU's kernel marks as undefined is not compared: NaN, and the lowest value of an integer type.
    """
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return Mismatch(actual.numel(), expected.numel(), (), float(expected.numel()), float(actual.numel()), float("inf"))
    if not expected.numel():
        return None
    error = _float_error(expected, actual) if expected.is_floating_point() else _integer_error(expected, actual)
    wrong = error > 1
    if not bool(wrong.any()):
        return None
    place = int(error.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape)) if expected.dim() else ()
    values = float(expected.flatten()[place]), float(actual.flatten()[place])
    return Mismatch(int(wrong.sum()), expected.numel(), index, *values, float(error.flatten()[place]))


def first_mismatch(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> str:
    """What differs first of results by name with both values, and how; "" where nothing does."""
    return next((f"{name}: {worst}" for name, expected, actual in pairs if (worst := mismatch(expected, actual))), "")


def _float_error(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    a, b = expected.double(), actual.double()
    size = a.abs().nan_to_num(0.0, posinf=0.0)
    row = size.amax(-1, keepdim=True) if a.dim() else size
    allowed = RELATIVE[expected.dtype] * (size + row) + torch.finfo(expected.dtype).tiny
    error = ((a - b).abs() / allowed).nan_to_num(float("inf"))
    # Equal infinities have no difference.
    return torch.where(a.isnan() | (a == b), 0.0, error)


def _integer_error(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    if expected.dtype == torch.bool:
        return (expected ^ actual).double() * 2
    allowed = INT8_STEPS + 0.5 if expected.dtype == torch.int8 else 0.5
    error = (expected.double() - actual.double()).abs() / allowed
    undefined = expected == torch.iinfo(expected.dtype).min if expected.dtype.is_signed else torch.zeros_like(expected, dtype=torch.bool)
    return torch.where(undefined, 0.0, error)


@dataclass
class Deviation:
    """Differences of one result over several steps.

    Attributes:
        difference, size: sums of squares, of the differences and of the values.
        wrong, of: integers that differ, and all.
    """

    dtype: torch.dtype
    difference: float = 0.0
    size: float = 0.0
    wrong: int = 0
    of: int = 0

    def add(self, expected: torch.Tensor, actual: torch.Tensor, where: torch.Tensor | None = None) -> None:
        """Adds the values of one step, of those elements that are defined, and in `where` if it is given."""
        defined = ~expected.isnan() if expected.is_floating_point() else torch.ones_like(expected, dtype=torch.bool)
        compared = defined if where is None else defined & where
        a, b = expected[compared].double(), actual[compared].double()
        if expected.is_floating_point():
            # A value that is not finite on one side only is as wrong as can be.
            same = (a == b) | ~(a.isfinite() | b.isfinite())
            self.difference += float(torch.where(same, 0.0, a - b).pow(2).nan_to_num(float("inf"), posinf=float("inf")).sum())
            self.size += float(torch.where(a.isfinite(), a, 0.0).pow(2).sum())
        else:
            self.wrong, self.of = self.wrong + int((a != b).sum()), self.of + len(a)

    @property
    def relative(self) -> float:
        """Root mean square of the differences over that of the values."""
        return math.sqrt(self.difference / max(self.size, 1e-30))

    @property
    def error(self) -> float:
        """Over what is allowed."""
        return self.wrong / self.of / INTEGERS if self.of else self.relative / DEVIATION.get(self.dtype, 1.0)

    def __str__(self) -> str:
        if self.of:
            return f"{self.wrong} of {self.of} integers differ; legal are at most {INTEGERS:.0%}"
        return f"values differ by {self.relative:.3g} of their root mean square; legal is at most {DEVIATION.get(self.dtype, 1.0):g}"


class Deviations:
    """Differences of named results over several steps; remembers the step after which each was first beyond what is allowed."""

    def __init__(self) -> None:
        self.by_name: dict[str, Deviation] = {}
        self.first_step: dict[str, int] = {}

    def add(self, step: int, name: str, expected: torch.Tensor, actual: torch.Tensor, where: torch.Tensor | None = None) -> None:
        """Adds one result of one step."""
        deviation = self.by_name.setdefault(name, Deviation(expected.dtype))
        deviation.add(expected, actual, where)
        if deviation.error > 1:
            self.first_step.setdefault(name, step)

    def beyond(self) -> list[str]:
        """Names of results that differ by more than is allowed, the worst first."""
        wrong = [name for name, deviation in self.by_name.items() if deviation.error > 1]
        return sorted(wrong, key=lambda name: -self.by_name[name].error)
