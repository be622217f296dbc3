"""Turns vectors into unit vectors, in f32."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

l2_norm = Primitive("l2_norm", "(Tensor x, float eps, float scale) -> Tensor", factors="t q h _ -> t q h _")


@l2_norm.abstract
def _abstract(x: torch.Tensor, eps: float, scale: float) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32)


@l2_norm.reference
def l2_norm_reference(x: torch.Tensor, eps: float, scale: float) -> torch.Tensor:
    """`scale * x / sqrt(sum(x^2) + eps)` over the last dimension: queries and keys of a gated DeltaNet layer.

    Args:
        x: [B, Q, H, D], any float dtype.

    Returns:
        [B, Q, H, D] f32.
    """
    wide = x.float()
    return wide * (torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps) * scale)


@l2_norm.lowering("ge")
def _npu(x: torch.Tensor, eps: float, scale: float) -> Any:
    wide = x.float()
    inverse = torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)
    return wide * (inverse if scale == 1.0 else inverse * scale)


@l2_norm.cost
def _cost(x: torch.Tensor, eps: float, scale: float) -> Cost:
    return Cost(4 * x.numel(), nbytes(x), 4 * x.numel())
