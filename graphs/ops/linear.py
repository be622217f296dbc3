"""Turns activations into activations through one weight matrix."""

from typing import Any

import torch

from ..native_ops import FEW_ROWS, Native
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


_few_rows = Native("npuc_linear", linear.schema, _abstract).op


@linear.lowering("inductor")
def linear_on_cpu(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Few rows in float32 go through a kernel that reads weights as fast as memory gives them (lowering/cpp/linear.cpp).

    Each row's result is the same bit for bit in any company; torch picks another order of summing for another number of rows.
    """
    if x.shape[0] <= FEW_ROWS and x.dtype == weight.dtype == torch.float32:
        return _few_rows(x, weight)
    return linear_reference(x, weight)


@linear.lowering("ge")
def _npu(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """One matrix product that takes the weight as it lies, without a transposed copy."""
    return torch.ops.npu.npu_linear(x, weight)


@linear.cost
def _cost(x: torch.Tensor, weight: torch.Tensor) -> Cost:
    return Cost(2 * x.shape[0] * weight.numel(), nbytes(x, weight), x.shape[0] * weight.shape[0] * x.dtype.itemsize)
