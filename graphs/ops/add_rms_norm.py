"""RMS norm of the sum of a residual stream and a block's output."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from .rms_norm import RmsNorm, npu_gamma, rms_norm_reference


class AddRmsNorm(NamedTuple):
    """Operands of `add_rms_norm`; `weight`, `eps` and `offset` as in `rms_norm`."""

    x: Tensor  # [T, M] output of a block
    residual: Tensor  # [T, M] stream it is added to, same dtype
    weight: Tensor  # [M]
    eps: float
    offset: float


add_rms_norm = Primitive("add_rms_norm", AddRmsNorm, factors="t _, t _, _ -> t _, t _")


@add_rms_norm.abstract
def _abstract(args: AddRmsNorm) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args.x), torch.empty_like(args.x)


@add_rms_norm.reference
def add_rms_norm_reference(args: AddRmsNorm) -> tuple[Tensor, Tensor]:
    """Adds, then normalises: `s = x + residual; y = rms_norm(s)`.

    Returns:
        y and s, each [T, M].
    """
    total = args.x + args.residual
    return rms_norm_reference(RmsNorm(total, args.weight, args.eps, args.offset)), total


@add_rms_norm.lowering("npu")
def _npu(args: AddRmsNorm) -> Any:
    gamma = npu_gamma(args.x, args.weight, args.offset)
    normed, _, total = torch.ops.npu.npu_add_rms_norm(args.x, args.residual, gamma, args.eps)
    return normed, total


@add_rms_norm.cost
def _cost(args: AddRmsNorm) -> Cost:
    return Cost(5 * args.x.numel(), nbytes(args.x, args.residual, args.weight), 2 * nbytes(args.x))
