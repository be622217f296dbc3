"""Product with one int4 weight matrix, of activations that are rounded to int8."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..quantise import NIBBLES, bits_scale, quantise_rows, unpack_w4
from .quant_experts import GROUPS
from .quant_linear import grouped_product


class QuantLinearW4A8(NamedTuple):
    """Operands of `quant_linear_w4a8`, with weight and scales as `graphs.quantise.quantise_w4` gives them."""

    x: Tensor  # [T, K]
    weight: Tensor  # [K, N/8] int32
    scale: Tensor  # [groups of K, N] int64
    assist: Tensor  # [N] f32; follows from weight and scale, and only kernels read it


quant_linear_w4a8 = Primitive("quant_linear_w4a8", QuantLinearW4A8, factors="t _, _ n, _ n, n -> t n", like="x")


@quant_linear_w4a8.reference
def quant_linear_w4a8_reference(args: QuantLinearW4A8) -> Tensor:
    """`x @ (weight * scale)` with x rounded to int8 row by row; K stays whole on one device, or the rounding would differ.

    Returns:
        [T, N], dtype of x.
    """
    rows, row_scale = quantise_rows(args.x)
    return (grouped_product(rows, unpack_w4(args.weight), bits_scale(args.scale)) * row_scale[:, None]).to(args.x.dtype)


@quant_linear_w4a8.lowering("npu")
def _npu(args: QuantLinearW4A8) -> Tensor:
    """One rounding kernel and a grouped product of one group: no other product takes int8 rows and int4 weights."""
    x, weight, scale, assist = args
    npu = torch.ops.npu
    rows, row_scale = npu.npu_dynamic_quant(x)
    count = torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device)
    out: Tensor = npu.npu_grouped_matmul(
        [rows], [weight.unsqueeze(0)], bias=[assist.unsqueeze(0)], scale=[scale.unsqueeze(0).view(torch.uint64)],
        per_token_scale=[row_scale], group_list=count, output_dtype=x.dtype, **GROUPS,
    )[0]  # fmt: skip
    return out


@quant_linear_w4a8.cost
def _cost(args: QuantLinearW4A8) -> Cost:
    x, weight, *_ = args
    return Cost(2 * x.shape[0] * weight.numel() * NIBBLES, nbytes(*args), x.shape[0] * args.scale.shape[1] * x.dtype.itemsize)
