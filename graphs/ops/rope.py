"""Rotary position embedding: the angles of positions, and queries or keys rotated by them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class RopeAngles(NamedTuple):
    """Operands of `rope_angles`."""

    positions: Tensor  # [T] integers
    width: int  # rotated dimensions, even
    theta: float


class Rope(NamedTuple):
    """Operands of `rope`."""

    x: Tensor  # [T, H, D]
    cos: Tensor  # [T, R/2] f32 with R <= D
    sin: Tensor  # [T, R/2] f32


rope_angles = Primitive("rope_angles", RopeAngles, factors="t -> t _, t _")
rope = Primitive("rope", Rope, factors="t h _, t _, t _ -> t h _")


@rope_angles.abstract
def _angles_abstract(args: RopeAngles) -> tuple[Tensor, Tensor]:
    shape, device = (args.positions.shape[0], args.width // 2), args.positions.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.float32, device=device)


@rope_angles.reference
def rope_angles_reference(args: RopeAngles) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `position * theta^(-2i/width)` (arXiv:2104.09864).

    Text positions are equal on all axes of an interleaved multi-axis rope, so this serves mrope models too.

    Returns:
        cos and sin, each [T, width / 2] f32.
    """
    positions, width, theta = args
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    angles = positions.float()[:, None] * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


rope_angles.lowering("npu")(rope_angles_reference)


@rope_angles.cost
def _angles_cost(args: RopeAngles) -> Cost:
    values = args.positions.shape[0] * args.width // 2
    return Cost(3 * values, nbytes(args.positions), 8 * values)


@rope.abstract
def _rope_abstract(args: Rope) -> Tensor:
    return torch.empty(args.x.shape, dtype=args.x.dtype, device=args.x.device)


@rope.reference
def rope_reference(args: Rope) -> Tensor:
    """Rotates the first R of the D dimensions, half-split; the rest pass through.

    Returns:
        [T, H, D], dtype of x.
    """
    x, cos, sin = args
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)
    return torch.cat([rotated, x[..., 2 * half :]], -1)


@rope.lowering("npu")
def _rope_npu(args: Rope) -> Any:
    """The rotated part alone goes through the kernel, whose angles are as wide as its operand and of its dtype."""
    x, cos, sin = args
    width = 2 * cos.shape[1]
    wide_cos, wide_sin = (torch.cat([part, part], -1).to(x.dtype)[None, :, None, :] for part in (cos, sin))
    rotated = torch.ops.npu.npu_rotary_mul(x[None, ..., :width], wide_cos, wide_sin).squeeze(0)
    return rotated if width == x.shape[-1] else torch.cat([rotated, x[..., width:]], -1)


@rope.cost
def _rope_cost(args: Rope) -> Cost:
    x, cos, _ = args
    return Cost(6 * x.shape[0] * x.shape[1] * cos.shape[1], nbytes(*args), nbytes(x))
