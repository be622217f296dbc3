"""Product with one int8 weight matrix."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native, Packed
from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows


class QuantLinear(NamedTuple):
    """Operands of `quant_linear`."""

    x: Tensor  # [T, K]
    weight: Tensor  # [K, N] int8
    scale: Tensor  # [N] f32


quant_linear = Primitive("quant_linear", QuantLinear, factors="t _, _ n, n -> t n", like="x")


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """Exact `rows @ weight` of small integers, [T, K] by [K, N], as f32 [T, N]."""
    # A sum of int8 products is far below 2^53, so float64 holds it, and multiplies faster than int32 does on a CPU.
    return (rows.double() @ weight.double()).float()


def grouped_product(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`rows @ (weight * scale)` as f32 [T, N], where `scale` [groups, N] is of equal groups of the K rows of the weight."""
    parts = zip(rows.chunk(len(scale), -1), weight.chunk(len(scale), -2), scale, strict=True)
    return torch.stack([product(part, columns) * each for part, columns, each in parts]).sum(0)


@quant_linear.reference
def quant_linear_reference(args: QuantLinear) -> Tensor:
    """`x @ (weight * scale)` with x rounded to int8 row by row; K stays whole on one device, or the rounding would differ.

    Returns:
        [T, N], dtype of x.
    """
    rows, row_scale = quantise_rows(args.x)
    return (product(rows, args.weight) * args.scale * row_scale[:, None]).to(args.x.dtype)


_panels = Native(
    "npuc_quant_linear", quant_linear.schema, quant_linear.rule("abstract"), Packed((1,), "int8", quant_linear.rule("reference"))
).op


@quant_linear.lowering("inductor")
def quant_linear_on_cpu(args: QuantLinear) -> Any:
    """The same numbers by integer arithmetic, with weights that were packed when they were loaded (lowering/cpp/linear_int8.cpp)."""
    if args.x.dtype in (torch.bfloat16, torch.float32) and args.scale.dtype == torch.float32:
        return _panels(*args)
    return quant_linear_reference(args)


@quant_linear.lowering("npu")
def quant_linear_ge(args: QuantLinear) -> Tensor:
    """One quantising kernel and one matrix product."""
    x, weight, scale = args
    npu = torch.ops.npu
    rows, row_scale = npu.npu_dynamic_quant(x)
    out: Tensor = npu.npu_quant_matmul(rows, weight, scale, pertoken_scale=row_scale, output_dtype=x.dtype)
    return out


@quant_linear.cost
def _cost(args: QuantLinear) -> Cost:
    x, weight, _ = args
    return Cost(2 * x.shape[0] * weight.numel(), nbytes(*args), x.shape[0] * weight.shape[1] * x.dtype.itemsize)
