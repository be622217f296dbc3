"""L2 norm: vectors of unit length."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class L2Norm(NamedTuple):
    """Operands of `l2_norm`."""

    x: Tensor  # [B, Q, H, D], any float dtype
    eps: float  # added to the sum of squares
    scale: float  # multiplies the result


l2_norm = Primitive("l2_norm", L2Norm, factors="t q h _ -> t q h _")


@l2_norm.abstract
def _abstract(args: L2Norm) -> Tensor:
    return torch.empty_like(args.x)


@l2_norm.reference
def l2_norm_reference(args: L2Norm) -> Tensor:
    """`scale * x / sqrt(sum(x^2) + eps)` over the last dimension: queries and keys of a gated DeltaNet layer.

    Returns:
        [B, Q, H, D], computed in f32 and rounded to the dtype of x.
    """
    wide = args.x.float()
    return (wide * (torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + args.eps) * args.scale)).to(args.x.dtype)


@l2_norm.lowering("npu")
def l2_norm_npu(args: L2Norm) -> Any:
    """An RMS norm: `x / sqrt(sum(x^2) + eps) = D^-0.5 x / sqrt(mean(x^2) + eps / D)`; its scale is f32, which 16 bits would round."""
    width = args.x.shape[-1]
    gamma = torch.full((width,), args.scale * width**-0.5, dtype=torch.float32, device=args.x.device)
    return torch.ops.npu.npu_rms_norm(args.x, gamma, args.eps / width)[0]


@l2_norm.cost
def _cost(args: L2Norm) -> Cost:
    return Cost(4 * args.x.numel(), nbytes(args.x), nbytes(args.x))
