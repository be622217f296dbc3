"""The tensors that a quantised matrix consists of: shapes, axes, and how they come from floats or from a checkpoint's integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...graphs.errors import CheckpointError
from ...graphs.quantise import assist_w4, grouped_scale, pack_w4, quantise_w4_values, quantise_w8, scale_bits
from ...graphs.types import Aval
from .formats import W4A8_DYNAMIC, W4A16, W8A8, W8A8_DYNAMIC

Axes = tuple[str | None, ...]

PLACEHOLDER_SCALE, PLACEHOLDER_OFFSET = 0.05, 3.0
"""Static scale and offset of activations where floats are quantised without a calibration, as rehearsals on random weights do."""


@dataclass(frozen=True)
class DeclaredMatrix:
    """A matrix as models declare it: `[lead..., out..., K]`, contraction last.

    Attributes:
        shape, axes: of the float matrix.
        lead: dimensions in front that count matrices: 1 for experts.
        row: whether the contraction is split over ranks by its axis, so that a rank rounds its own part of the activations.
        parts: into how many parts the contraction is split.
    """

    shape: tuple[int, ...]
    axes: Axes
    lead: int
    row: bool
    parts: int = 1

    @property
    def contraction(self) -> int:
        """K."""
        return self.shape[-1]

    @property
    def channels(self) -> tuple[int, ...]:
        """Sizes of the output dimensions."""
        return self.shape[self.lead : -1]

    def turned(self, values: torch.Tensor) -> torch.Tensor:
        """`[lead..., out..., K]` -> `[lead..., K, out...]`."""
        return values.movedim(-1, self.lead)

    def _leading(self) -> tuple[tuple[int, ...], Axes]:
        return self.shape[: self.lead], self.axes[: self.lead]

    def weight(self, dtype: torch.dtype, packed: int = 1) -> Aval:
        """Of the integers `[lead..., K, out...]`, of which `packed` neighbours of the last dimension are one element."""
        (lead, lead_axes), out, out_axes = self._leading(), self.channels, self.axes[self.lead : -1]
        return Aval((*lead, self.contraction, *out[:-1], out[-1] // packed), dtype, (*lead_axes, self.axes[-1], *out_axes))

    def per_channel(self, dtype: torch.dtype) -> Aval:
        """Of a number for each output channel; where the contraction is split, for each part: `[parts, lead..., out...]`."""
        (lead, lead_axes), out_axes = self._leading(), self.axes[self.lead : -1]
        shape, axes = (*lead, *self.channels), (*lead_axes, *out_axes)
        return Aval((self.parts, *shape), dtype, (self.axes[-1], *axes)) if self.row else Aval(shape, dtype, axes)

    def per_group(self, dtype: torch.dtype, groups: int) -> Aval:
        """Of a number for each group of weights: `[lead..., groups, out...]`."""
        (lead, lead_axes), out_axes = self._leading(), self.axes[self.lead : -1]
        split = self.axes[-1] if self.row and groups > 1 else None
        return Aval((*lead, groups, *self.channels), dtype, (*lead_axes, split, *out_axes))

    def groups(self, group: int) -> int:
        """How many scales an output channel has along the contraction.

        Raises:
            CheckpointError: the groups do not fill the contraction, or a part of it.
        """
        if not group:
            return self.parts if self.row else 1
        if self.contraction % group or (self.row and (self.contraction // group) % self.parts):
            raise CheckpointError(
                f"groups of {group} weights for a contraction of {self.contraction} in {self.parts if self.row else 1} parts; "
                "legal are sizes that divide each part"
            )
        return self.contraction // group


def avals(matrix: DeclaredMatrix, form: str, group: int) -> dict[str, Aval]:
    """The tensors of a quantised matrix by name, in the order of the products' operands.

    Args:
        group: weights of an output channel that share an int4 scale; 0: all.
    """
    F32 = torch.float32
    if form == W8A8_DYNAMIC:
        return {"weight": matrix.weight(torch.int8), "scale": matrix.per_channel(F32)}
    if form == W8A8:
        return {
            "weight": matrix.weight(torch.int8),
            "scale": matrix.per_channel(F32),
            "quant_bias": matrix.per_channel(torch.int32),
            "input_scale": Aval((1,), F32, (None,)),
            "input_offset": Aval((1,), F32, (None,)),
        }
    if form == W4A16:
        return {"weight": matrix.weight(torch.int32, 8), "group_scale": matrix.per_group(F32, matrix.groups(group))}
    assert form == W4A8_DYNAMIC, form
    return {
        "weight": matrix.weight(torch.int32, 8),
        "scale": matrix.per_group(torch.int64, matrix.groups(group)),
        "assist": matrix.per_channel(F32),
    }


def _weight_axes(axes: Axes, lead: int, row: bool, tensor: torch.Tensor) -> Axes:
    return (*axes[:lead], axes[-1], *axes[lead:-1])


def _scale_axes(axes: Axes, lead: int, row: bool, tensor: torch.Tensor) -> Axes:
    if tensor.dtype == torch.float32 or tensor.dtype == torch.int32:
        return (axes[-1], *axes[:-1]) if row else axes[:-1]
    return _group_axes(axes, lead, row, tensor)


def _group_axes(axes: Axes, lead: int, row: bool, tensor: torch.Tensor) -> Axes:
    return (*axes[:lead], axes[-1] if row and tensor.shape[lead] > 1 else None, *axes[lead:-1])


def _bias_axes(axes: Axes, lead: int, row: bool, tensor: torch.Tensor) -> Axes:
    return axes[lead:-1]


def _one_axes(axes: Axes, lead: int, row: bool, tensor: torch.Tensor) -> Axes:
    return (None,)


AXES: Mapping[str, Callable[[Axes, int, bool, torch.Tensor], Axes]] = {
    "weight": _weight_axes,
    "scale": _scale_axes,
    "group_scale": _group_axes,
    "assist": _scale_axes,
    "quant_bias": _scale_axes,
    "bias": _bias_axes,
    "input_scale": _one_axes,
    "input_offset": _one_axes,
}
"""Name of a tensor of a weight -> its logical axes, from those of the float matrix `[lead..., out..., K]`."""


def from_floats(matrix: DeclaredMatrix, form: str, group: int, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rounds a float matrix `[lead..., out..., K]`; the tensors are those of `avals`, of what is given of the matrix."""
    flat = _flat(matrix, values)
    if form in (W8A8_DYNAMIC, W8A8):
        integers, scale = quantise_w8(flat)
        weight = _unflat(matrix, integers, values)
        if form == W8A8_DYNAMIC:
            return weight, _parts(matrix, _channels(scale, values), values)
        step, offset = torch.tensor([PLACEHOLDER_SCALE]), torch.tensor([PLACEHOLDER_OFFSET])
        bias = -(offset.to(torch.int32) * integers.sum(-2, dtype=torch.int32))
        return weight, *_static(matrix, _channels(scale * step, values), _channels(bias, values), values), step, offset
    # Kernels beside floats multiply by scales in the dtype of the activations.
    integers, scale = quantise_w4_values(flat, group, torch.bfloat16 if form == W4A16 else None)
    return _int4(matrix, form, integers, scale, values)


def from_integers(matrix: DeclaredMatrix, form: str, group: int, values: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of `avals` from a checkpoint's.

    Args:
        values: int8 `[lead..., out..., K]`, for int4 with a value in each.
        others: `weight_scale` `[lead..., out..., 1]`; for int4 in groups then `weight_scale_second` `[lead..., out..., K / group]`; for
            W4A16 `weight_scale` `[lead..., out..., groups]`; for W8A8 `deq_scale`, `quant_bias` `[out..., 1]`, `input_scale` and
            `input_offset` [1] of each tensor that was joined.

    Raises:
        CheckpointError: matrices that are multiplied as one have different scales of their common activations.
    """
    flat = _flat(matrix, values)
    if form == W8A8_DYNAMIC:
        return _unflat(matrix, flat, values), _parts(matrix, others[0].float().squeeze(-1), values)
    if form == W8A8:
        scale, bias, *inputs = others
        wide = scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale.float()
        steps, offsets = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
        for each in (steps, offsets):
            if any(not torch.equal(one.float(), each[0].float()) for one in each):
                raise CheckpointError(
                    f"input_scale and input_offset of matrices that are multiplied as one are {[float(one) for one in each]}; legal is one"
                )
        parts = _static(matrix, wide.squeeze(-1), bias.squeeze(-1).to(torch.int32), values)
        return _unflat(matrix, flat, values), *parts, steps[0].float().reshape(1), offsets[0].float().reshape(1)
    if form == W4A16:
        return _int4(matrix, form, flat, others[0].float().flatten(matrix.lead, -2).movedim(-1, matrix.lead), values)
    scale = others[0].float().squeeze(-1).flatten(matrix.lead)[..., None, :]
    if len(others) > 1:
        scale = grouped_scale(scale, others[1].float().flatten(matrix.lead, -2).movedim(-1, matrix.lead))
    return _int4(matrix, form, flat, scale, values)


def _int4(matrix: DeclaredMatrix, form: str, integers: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Packed weight, scale and, where activations are int8, the correction; `integers` [lead..., K, N], `scale` [lead..., groups, N]."""
    channels = like.shape[matrix.lead : -1]
    weight = pack_w4(integers).unflatten(-1, (*channels[:-1], channels[-1] // 8))
    share = _share(matrix, like)
    groups = scale.shape[-2]
    whole = scale if not matrix.row or groups % share == 0 else scale.expand(*scale.shape[:-2], share, scale.shape[-1])
    if form == W4A16:
        return weight, whole.unflatten(-1, channels).contiguous()
    split = integers.unflatten(-2, (share, -1))
    scales = whole.unflatten(-2, (share, -1))
    assist = torch.stack([assist_w4(split.select(-3, i), scales.select(-3, i)) for i in range(share)])
    assist = assist if matrix.row else assist[0]
    return weight, scale_bits(whole).unflatten(-1, channels), assist.unflatten(-1, channels)


def _flat(matrix: DeclaredMatrix, values: torch.Tensor) -> torch.Tensor:
    """`[lead..., out..., K]` -> `[lead..., K, N]`, N all output channels."""
    return values.flatten(matrix.lead, -2).transpose(-1, -2)


def _unflat(matrix: DeclaredMatrix, flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    channels: torch.Tensor = flat.contiguous().unflatten(-1, like.shape[matrix.lead : -1])
    return channels


def _channels(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[lead..., N]` -> `[lead..., out...]`."""
    return flat.reshape(like.shape[:-1])


def _share(matrix: DeclaredMatrix, values: torch.Tensor) -> int:
    """Parts of the contraction in what is given of it."""
    return max(1, matrix.parts * values.shape[-1] // matrix.contraction) if matrix.row else 1


def _parts(matrix: DeclaredMatrix, channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy for each part of the contraction, where it is split."""
    return channels.expand(_share(matrix, values), *channels.shape) if matrix.row else channels


def _static(matrix: DeclaredMatrix, scale: torch.Tensor, bias: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and bias of each part; the bias is of the whole contraction, and the first part has it."""
    if not matrix.row:
        return scale, bias
    rows = torch.zeros(_share(matrix, values), *bias.shape, dtype=bias.dtype)
    rows[0] = bias
    return _parts(matrix, scale, values), rows
