"""RMS norm: activations of unit root mean square, scaled per channel."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class RmsNorm(NamedTuple):
    """Operands of `rms_norm`."""

    x: Tensor  # [..., M], any float dtype
    weight: Tensor  # [M]
    eps: float  # added to the mean square
    offset: float  # added to the weight: 1 for the zero-centred weights of Qwen3.5, else 0


rms_norm = Primitive("rms_norm", RmsNorm, factors="... _, _ -> ... _")


@rms_norm.abstract
def _abstract(args: RmsNorm) -> Tensor:
    return torch.empty_like(args.x)


@rms_norm.reference
def rms_norm_reference(args: RmsNorm) -> Tensor:
    """Normalises the last dimension: `x / rms(x) * (offset + weight)`, in f32, cast back (arXiv:1910.07467).

    Returns:
        [..., M], dtype of x.
    """
    wide = args.x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + args.eps)
    return (unit * (args.offset + args.weight.float())).to(args.x.dtype)


def npu_gamma(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    """The scale [M] that the NPU's norms multiply by, in the dtype of x, which they ask for."""
    return (weight + offset if offset else weight).to(x.dtype)


@rms_norm.lowering("npu")
def _npu(args: RmsNorm) -> Any:
    return torch.ops.npu.npu_rms_norm(args.x, npu_gamma(args.x, args.weight, args.offset), args.eps)[0]


@rms_norm.cost
def _cost(args: RmsNorm) -> Cost:
    return Cost(4 * args.x.numel(), nbytes(args.x, args.weight), nbytes(args.x))
