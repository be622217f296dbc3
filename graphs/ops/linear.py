"""Turns activations into activations through one weight matrix."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

linear = Primitive("linear", "(Tensor x, Tensor weight) -> Tensor", factors="t k, n k -> t n; sum k")


@linear.abstract
def _abstract(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


@linear.reference
def linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`.

    Args:
        x: [T, K].
        weight: [N, K], same dtype.

    Returns:
        [T, N].
    """
    return torch.nn.functional.linear(x, weight)


@linear.lowering("ge")
def _npu(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """One matrix product that takes the weight as it lies, without a transposed copy."""
    return torch.ops.npu.npu_linear(x, weight)


@linear.cost
def _cost(x: torch.Tensor, weight: torch.Tensor) -> Cost:
    return Cost(2 * x.shape[0] * weight.numel(), nbytes(x, weight), x.shape[0] * weight.shape[0] * x.dtype.itemsize)
