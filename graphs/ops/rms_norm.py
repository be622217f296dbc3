"""Turns activations into activations of unit root mean square, scaled per channel."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

rms_norm = Primitive("rms_norm", "(Tensor x, Tensor weight, float eps, float offset) -> Tensor", factors="... _, _ -> ... _")


@rms_norm.abstract
def _abstract(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    return torch.empty_like(x)


@rms_norm.reference
def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Normalises the last dimension: `x / rms(x) * (offset + weight)`, in f32, cast back (arXiv:1910.07467).

    Args:
        x: [..., M], any float dtype.
        weight: [M]; `offset` is 1 for the zero-centred weights of Qwen3.5, else 0.
        eps: added to the mean square.

    Returns:
        [..., M], dtype of x.
    """
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (unit * (offset + weight.float())).to(x.dtype)


def npu_gamma(x: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    """The scale [M] that the NPU's norms multiply by, in the dtype of x, which they ask for."""
    return (weight + offset if offset else weight).to(x.dtype)


@rms_norm.lowering("ge")
def _npu(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> Any:
    return torch.ops.npu.npu_rms_norm(x, npu_gamma(x, weight, offset), eps)[0]


@rms_norm.cost
def _cost(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> Cost:
    return Cost(4 * x.numel(), nbytes(x, weight), nbytes(x))
