"""Turns activations into gated activations: the first half of a SwiGLU feed-forward."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes
from .linear import linear_on_cpu

swiglu_linear = Primitive("swiglu_linear", "(Tensor x, Tensor weight) -> Tensor", factors="t _, _ f _ -> t f")


@swiglu_linear.abstract
def _abstract(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)


@swiglu_linear.reference
def swiglu_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`silu(x @ weight[0].T) * (x @ weight[1].T)` (arXiv:2002.05202).

    The two halves are a dimension of their own, so that a shard of F holds the same channels of both.

    Args:
        x: [T, M].
        weight: [2, F, M], gate then up.

    Returns:
        [T, F].
    """
    gate, up = torch.nn.functional.linear(x, weight.flatten(0, 1)).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@swiglu_linear.lowering("inductor")
def _cpu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = linear_on_cpu(x, weight.flatten(0, 1)).chunk(2, -1)
    gated: torch.Tensor = torch.nn.functional.silu(gate) * up
    return gated


@swiglu_linear.lowering("ge")
def _npu(x: torch.Tensor, weight: torch.Tensor) -> Any:
    npu = torch.ops.npu
    return npu.npu_swiglu(npu.npu_linear(x, weight.flatten(0, 1)))


@swiglu_linear.cost
def _cost(x: torch.Tensor, weight: torch.Tensor) -> Cost:
    rows = x.shape[0]
    return Cost(2 * rows * weight.numel() + 5 * rows * weight.shape[1], nbytes(x, weight), rows * weight.shape[1] * x.dtype.itemsize)
