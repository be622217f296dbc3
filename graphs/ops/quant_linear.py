"""Turns activations into activations through one int8 weight matrix."""

import torch

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows

quant_linear = Primitive("quant_linear", "(Tensor x, Tensor weight, Tensor scale) -> Tensor", factors="t _, _ n, n -> t n")


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Exact `rows @ weight` of small integers, [T, K] by [K, N], as f32 [T, N]."""
    # A sum of int8 products is far below 2^53, so float64 holds it, and multiplies faster than int32 does on a CPU.
    return (rows.double() @ weight.double()).float()


@quant_linear.abstract
def _abstract(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)


@quant_linear.reference
def quant_linear_reference(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x @ (weight * scale)` with x rounded to int8 row by row; whole K on one device, or the rounding would differ.

    Args:
        x: [T, K].
        weight: [K, N] int8.
        scale: [N] f32.

    Returns:
        [T, N], dtype of x.
    """
    rows, row_scale = quantise_rows(x)
    return (product(rows, weight) * scale * row_scale[:, None]).to(x.dtype)


@quant_linear.lowering("ge")
def quant_linear_ge(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One quantising kernel and one matrix product."""
    npu = torch.ops.npu
    rows, row_scale = npu.npu_dynamic_quant(x)
    out: torch.Tensor = npu.npu_quant_matmul(rows, weight, scale, pertoken_scale=row_scale, output_dtype=x.dtype)
    return out


@quant_linear.cost
def _cost(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Cost:
    tokens, wide = x.shape[0], weight.shape[1]
    return Cost(2 * tokens * weight.numel(), nbytes(x, weight, scale), tokens * wide * x.dtype.itemsize)
