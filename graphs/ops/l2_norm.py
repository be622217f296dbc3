"""L2 norm: vectors of unit length, in f32."""

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
    return torch.empty_like(args.x, dtype=torch.float32)


@l2_norm.reference
def l2_norm_reference(args: L2Norm) -> Tensor:
    """`scale * x / sqrt(sum(x^2) + eps)` over the last dimension: queries and keys of a gated DeltaNet layer.

    Returns:
        [B, Q, H, D] f32.
    """
    wide = args.x.float()
    return wide * (torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + args.eps) * args.scale)


@l2_norm.lowering("npu")
def _npu(args: L2Norm) -> Any:
    wide = args.x.float()
    inverse = torch.rsqrt((wide * wide).sum(-1, keepdim=True) + args.eps)
    return wide * (inverse if args.scale == 1.0 else inverse * args.scale)


@l2_norm.cost
def _cost(args: L2Norm) -> Cost:
    return Cost(4 * args.x.numel(), nbytes(args.x), 4 * args.x.numel())
