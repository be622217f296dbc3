"""Operands for single operators: as recorded in a step, random, and extreme ones, all of which the operator's documentation allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ....lowering.ascend.operators.call import GeOp
from ....lowering.ascend.operators.table import BY_TYPE
from ....lowering.ascend.operators.trials import LARGE, Tensors, Trial

SIZES = {
    "shape", "axes", "axis", "perm", "begin", "end", "strides", "size_splits", "split_dim", "concat_dim", "multiples", "paddings", "dims",
}  # fmt: skip
"""Integer inputs that are sizes and places, not data."""


@dataclass(frozen=True)
class Draw:
    """How operands are drawn.

    Attributes:
        floats: of a tensor of that shape.
        int8: the same for int8.
    """

    name: str
    floats: Callable[[tuple[int, ...], torch.Generator], torch.Tensor]
    int8: Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator) * 2 - 1


DRAWS = (
    Draw("random", _normal, lambda shape, generator: torch.randint(-127, 128, shape, generator=generator)),
    Draw("zeros", lambda shape, _: torch.zeros(shape), lambda shape, _: torch.zeros(shape)),
    Draw("large", lambda shape, generator: LARGE * _signs(shape, generator), lambda shape, generator: 127 * _signs(shape, generator)),
)


def variants(op: GeOp, recorded: Tensors, written: frozenset[str]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Sets of operands by GE's name of the input, each with what is special about it.

    Args:
        recorded: values of a legal step; constants are among them and are not changed.
        written: inputs that the operator writes; they are pools, and finite.
    """
    trial, finite = BY_TYPE[op.type].trial, {slot: _finite(value) for slot, value in recorded.items()}
    if not trial.distinct:
        yield "recorded", finite
    for number, draw in enumerate(DRAWS):
        if draw.name != "random" and (trial.distinct or (draw.name == "zeros" and trial.positive)):
            continue
        generator = torch.Generator().manual_seed(number)
        yield draw.name, {slot: _drawn(op, slot, value, finite, draw, generator) for slot, value in finite.items()}
    for name, changed in trial.corners(op, finite):
        yield name, {**finite, **changed}


def _drawn(op: GeOp, slot: str, value: torch.Tensor, recorded: Tensors, draw: Draw, generator: torch.Generator) -> torch.Tensor:
    trial, shape = BY_TYPE[op.type].trial, tuple(value.shape)
    if value.dtype.is_floating_point:
        return _floats(trial, slot, value, draw, generator)
    if value.dtype == torch.int8:
        return draw.int8(shape, generator).to(torch.int8)
    if value.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool() if trial.any_integers else value
    if slot in trial.indices:
        return trial.indices[slot](op, value, recorded, generator).to(value.dtype)
    if trial.any_integers and slot not in SIZES:
        low = 1 if slot in trial.positive else -100
        return torch.randint(low, 101, shape, generator=generator).to(value.dtype)
    return value


def _floats(trial: Trial, slot: str, value: torch.Tensor, draw: Draw, generator: torch.Generator) -> torch.Tensor:
    shape = tuple(value.shape)
    if trial.distinct:
        return distinct(shape, value.dtype, generator)
    drawn = trial.floats(slot, draw.floats(shape, generator))
    if slot in trial.positive or "scale" in slot:
        drawn = drawn.abs() + 0.125
    return drawn.to(value.dtype)


def distinct(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values that differ along the last dimension, in random order; as far as the dtype has that many."""
    if not shape:
        return torch.ones(shape, dtype=dtype)
    rows = [torch.randperm(shape[-1], generator=generator) for _ in range(max(1, torch.Size(shape[:-1]).numel()))]
    numbers = torch.stack(rows).reshape(shape)
    if dtype.itemsize == 2:
        # Neighbouring numbers of 16-bit floats, from those around one: a linear range would round to equal values.
        lowest = 0x3F80 - min(shape[-1] // 2, 0x3000)
        return (lowest + numbers % 0x7000).to(torch.int16).view(dtype)
    return (numbers / shape[-1] * 8 - 4).to(dtype)


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value.nan_to_num(0.0) if value.dtype.is_floating_point else value
