"""Turns a residual stream and an addend into their sum and the sum's RMS norm."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes
from .rms_norm import npu_gamma, rms_norm_reference

add_rms_norm = Primitive(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    factors="t _, t _, _ -> t _, t _",
)


@add_rms_norm.abstract
def _abstract(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@add_rms_norm.reference
def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds, then normalises: `s = x + residual; y = rms_norm(s)`.

    Args:
        x: [T, M] output of a block.
        residual: [T, M] stream it is added to, same dtype.
        weight: [M]; `offset` and `eps` as in rms_norm.

    Returns:
        y and s, each [T, M].
    """
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset), total


@add_rms_norm.lowering("ge")
def _npu(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> Any:
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, npu_gamma(x, weight, offset), eps)
    return normed, total


@add_rms_norm.cost
def _cost(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> Cost:
    return Cost(5 * x.numel(), nbytes(x, residual, weight), 2 * nbytes(x))
