"""The tensors that a checkpoint has of a quantised matrix, and the floats they stand for: ModelSlim's (26.1.0, save/ascendv1.py), and those
of packed.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...graphs.quantise import INT8_MAX, pack_rows, quantise_w4_values, quantise_w8
from ...models.quant.formats import W4A8_DYNAMIC, W4A16, W8A8, W8A8_DYNAMIC
from .packed import SHAPE, packed

TYPES = {W8A8: "W8A8", W8A8_DYNAMIC: "W8A8_DYNAMIC", W4A8_DYNAMIC: "W4A8_DYNAMIC", W4A16: "W4A16"}
"""Format -> its name in a description of ModelSlim."""

SCALE_BIAS_PARTS = 16
"""Parts of a contraction that ranks share, each with a correction of its own in int4."""

INT8_STEPS = 2 * INT8_MAX + 1
"""Steps from the least int8 to the largest."""


class Activations(NamedTuple):
    """Scale and offset of a matrix's activations, the same for all tokens: x is about `(q - offset) * scale`."""

    scale: float
    offset: float

    @staticmethod
    def of_range(low: float, high: float) -> Activations:
        """Of activations between two values, so that 0 is exact (ModelSlim 26.1.0, ir/api/impl/int_quantization.py)."""
        low, high = min(low, 0.0), max(high, 0.0)
        limits = torch.tensor([low, high])
        scale = (limits[1] / INT8_STEPS - limits[0] / INT8_STEPS).clamp(min=torch.finfo(torch.float32).eps)
        return Activations(float(scale), float((-limits[0] / scale).round() - (INT8_MAX + 1)))


class Quantised(NamedTuple):
    """A quantised matrix [N, K].

    Attributes:
        tensors: as they are written, by the end of their names.
        floats: [N, K] f32 that they stand for.
    """

    tensors: dict[str, torch.Tensor]
    floats: torch.Tensor


def quantised(
    values: torch.Tensor,
    form: str,
    *,
    row: bool = False,
    group: int = 0,
    activations: Activations | None = None,
    dtype: torch.dtype | None = None,
) -> Quantised:
    """Rounds a matrix as loading one with the same format does.

    Args:
        values: floats [N, K], output channels first. A `meta` tensor gives the shapes and dtypes of what would be written.
        form: any but float.
        row: whether ranks share the contraction.
        group: weights of an output channel that share an int4 scale; 0: all.
        activations: for W8A8.
        dtype: that the model computes in, which decides how W8A8 and scales of W4A16 are written; by default that of the values.
    """
    if form == W4A8_DYNAMIC:
        return _int4(values, row, group)
    if form == W4A16:
        return Quantised(*packed(values, group, dtype or values.dtype))
    integers, scale = quantise_w8(values.t())
    weight, floats = integers.t(), (integers * scale).t()
    if form == W8A8_DYNAMIC:
        return Quantised({"weight": weight, **_symmetric("weight", scale[:, None])}, floats)
    assert form == W8A8, form
    assert activations is not None, form
    return Quantised({"weight": weight, **_static(dtype or values.dtype, weight, scale, activations)}, floats)


BLOCK_ELEMENTS = 2**19
"""Rounding in blocks of rows of about this size stays in a processor's cache, and needs little memory beside a matrix."""

_OF_ALL_ROWS = ("input_scale", "input_offset")


class Rounded(NamedTuple):
    """A quantised matrix [N, K] without the floats that it stands for.

    Attributes:
        tensors: as of `Quantised`.
        change, norm: sums of the squares of what rounding changed, and of the floats.
    """

    tensors: dict[str, torch.Tensor]
    change: float
    norm: float


def rounded(values: torch.Tensor, rounding: Callable[[torch.Tensor], Quantised]) -> Rounded:
    """Rounds a matrix [N, K] of floats block by block.

    Args:
        rounding: `quantised` with its options; a row's scales depend on that row alone.
    """
    parts: list[dict[str, torch.Tensor]] = []
    change = norm = 0.0
    # Two rows share a byte in int4.
    for block in values.split(max(2, BLOCK_ELEMENTS // values.shape[1] // 2 * 2)):
        each = rounding(block)
        parts.append(each.tensors)
        wide = block.float()
        norm += float(wide.square().sum())
        change += float((each.floats - wide).square().sum())
    names = parts[0]
    joined = {name: parts[0][name] if name in _OF_ALL_ROWS else torch.cat([part[name] for part in parts]) for name in names}
    if SHAPE in joined:
        joined[SHAPE] = torch.tensor(values.shape)
    return Rounded(joined, change, norm)


def _static(dtype: torch.dtype, weight: torch.Tensor, scale: torch.Tensor, activations: Activations) -> dict[str, torch.Tensor]:
    deq_scale = scale * torch.tensor(activations.scale)
    # Operators of models that do not compute in bfloat16 read the bits of a float32 in 64 bits.
    stored = deq_scale if dtype == torch.bfloat16 else deq_scale.view(torch.int32).to(torch.int64)
    return {
        "quant_bias": -(int(activations.offset) * weight.sum(1, dtype=torch.int32)),
        "input_scale": torch.tensor([activations.scale], device=weight.device),
        "input_offset": torch.tensor([activations.offset], device=weight.device),
        "deq_scale": stored,
    }


def _int4(values: torch.Tensor, row: bool, group: int) -> Quantised:
    integers, scale = (x.t() for x in quantise_w4_values(values.t(), group))
    floats = (integers.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)
    tensors = {"weight": pack_rows(integers, 0)}
    if group:
        # Their product, rounded to float16, is the scale of the group again: the largest quotient is 1, and none loses bits of float16.
        channel = scale.amax(-1, keepdim=True)
        tensors |= _symmetric("weight", channel) | _second(scale / channel)
    else:
        tensors |= _symmetric("weight", scale)
    parts = SCALE_BIAS_PARTS if row else 1
    tensors["scale_bias"] = 8 * floats.unflatten(-1, (parts, -1)).sum(-1)
    return Quantised(tensors, floats)


def _symmetric(name: str, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}_scale": scale, f"{name}_offset": torch.zeros_like(scale)}


def _second(scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight_scale_second": scale, "weight_offset_second": torch.zeros_like(scale, dtype=torch.int64)}
