"""Turns queries or keys into rotated ones, and positions into the angles they are rotated by."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

rope_angles = Primitive("rope_angles", "(Tensor positions, int width, float theta) -> (Tensor, Tensor)", factors="t -> t _, t _")
rope = Primitive("rope", "(Tensor x, Tensor cos, Tensor sin) -> Tensor", factors="t h _, t _, t _ -> t h _")


@rope_angles.abstract
def _angles_abstract(positions: torch.Tensor, width: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (positions.shape[0], width // 2)
    return tuple(torch.empty(shape, dtype=torch.float32, device=positions.device) for _ in range(2))  # type: ignore[return-value]


@rope_angles.reference
def rope_angles_reference(positions: torch.Tensor, width: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of `position * theta^(-2i/width)` (arXiv:2104.09864).

    Text positions are equal on all axes of an interleaved multi-axis rope, so this serves mrope models too.

    Args:
        positions: [T] integers.
        width: rotated dimensions, even.

    Returns:
        cos and sin, each [T, width / 2] f32.
    """
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    angles = positions.float()[:, None] * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


rope_angles.lowering("ge")(rope_angles_reference)


@rope_angles.cost
def _angles_cost(positions: torch.Tensor, width: int, theta: float) -> Cost:
    values = positions.shape[0] * width // 2
    return Cost(3 * values, nbytes(positions), 8 * values)


@rope.abstract
def _rope_abstract(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@rope.reference
def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first `2 * cos.shape[1]` of the D dimensions, half-split; the rest pass through.

    Args:
        x: [T, H, D].
        cos, sin: [T, R/2] f32 with R <= D.

    Returns:
        [T, H, D], dtype of x.
    """
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., 2 * half :]], -1)


@rope.lowering("ge")
def _rope_npu(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """The rotated part alone goes through the kernel, whose angles are as wide as its operand and of its dtype."""
    width = 2 * cos.shape[1]
    wide_cos, wide_sin = (torch.cat([part, part], -1).to(x.dtype)[None, :, None, :] for part in (cos, sin))
    turned = torch.ops.npu.npu_rotary_mul(x[None, ..., :width], wide_cos, wide_sin).squeeze(0)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], -1)


@rope.cost
def _rope_cost(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Cost:
    return Cost(6 * x.shape[0] * x.shape[1] * cos.shape[1], nbytes(x, cos, sin), nbytes(x))
