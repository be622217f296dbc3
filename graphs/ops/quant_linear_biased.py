"""Product with one int8 weight matrix, and a bias of each of its channels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows
from .quant_linear import QuantLinear, product, quant_linear_on_cpu


class QuantLinearBiased(NamedTuple):
    """Operands of `quant_linear_biased`."""

    x: Tensor  # [T, K]
    weight: Tensor  # [K, N] int8
    scale: Tensor  # [N] f32
    bias: Tensor  # [N] in x's dtype


quant_linear_biased = Primitive("quant_linear_biased", QuantLinearBiased, factors="t _, _ n, n, n -> t n", like="x")


@quant_linear_biased.reference
def quant_linear_biased_reference(args: QuantLinearBiased) -> Tensor:
    """`x @ (weight * scale) + bias` with x rounded as by `quant_linear`; the sum is rounded once.

    Returns:
        [T, N], dtype of x.
    """
    rows, row_scale = quantise_rows(args.x)
    return (product(rows, args.weight) * args.scale * row_scale[:, None] + args.bias.float()).to(args.x.dtype)


@quant_linear_biased.lowering("inductor")
def _cpu(args: QuantLinearBiased) -> Any:
    """The kernel of the product, and a sum that is fused with what follows; the product is rounded before it."""
    return quant_linear_on_cpu(QuantLinear(*args[:3])) + args.bias


@quant_linear_biased.lowering("npu")
def _npu(args: QuantLinearBiased) -> Tensor:
    """The matrix product adds the bias: a pass over its result costs a tenth of a short product."""
    x, weight, scale, bias = args
    rows, row_scale = torch.ops.npu.npu_dynamic_quant(x)
    out: Tensor = torch.ops.npu.npu_quant_matmul(rows, weight, scale, pertoken_scale=row_scale, bias=bias, output_dtype=x.dtype)
    return out


@quant_linear_biased.cost
def _cost(args: QuantLinearBiased) -> Cost:
    x, weight, *_ = args
    return Cost(2 * x.shape[0] * weight.numel(), nbytes(*args), x.shape[0] * weight.shape[1] * x.dtype.itemsize)
