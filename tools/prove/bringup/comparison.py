"""Compares what a device computed with what the CPU computed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

RELATIVE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-11}
"""Largest difference of a float over the sum of its own size and that of the largest value of its row (last dimension).

Four roundings of bfloat16 and float16. float32 products may be computed in fewer bits on a matrix unit, so it is allowed 2**-11."""
INT8_STEPS = 1
"""Quantised values may round the other way where sums are added in another order."""


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


def mismatch(expected: torch.Tensor, actual: torch.Tensor, factor: float = 1.0) -> Mismatch | None:
    """The worst difference beyond the tolerance of the dtype; None where there is none.

    What the CPU's kernel marks as undefined is not compared: NaN, and the lowest value of an integer type.

    Args:
        factor: widens the tolerance of floats, for several operators after each other.
    """
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return Mismatch(actual.numel(), expected.numel(), (), float(expected.numel()), float(actual.numel()), float("inf"))
    if not expected.numel():
        return None
    error = _float_error(expected, actual) / factor if expected.is_floating_point() else _integer_error(expected, actual)
    wrong = error > 1
    if not bool(wrong.any()):
        return None
    place = int(error.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape)) if expected.dim() else ()
    values = float(expected.flatten()[place]), float(actual.flatten()[place])
    return Mismatch(int(wrong.sum()), expected.numel(), index, *values, float(error.flatten()[place]))


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


DEVIATION = {torch.bfloat16: 0.05, torch.float16: 0.02, torch.float32: 0.02}
"""Largest root mean square of the differences over that of the values, of several operators after each other: single values differ more,
where a router or a rounding step that is undecided goes the other way."""
INTEGERS = 0.05
"""Largest share of integers that differ: tokens and drafts, where two logits are as good as equal."""


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
        kept = defined if where is None else defined & where
        a, b = expected[kept].double(), actual[kept].double()
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
