"""Product with one int4 weight matrix, of activations that stay what they are."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native, Packed
from ..primitive import Cost, Primitive, nbytes
from ..quantise import NIBBLES, unpack_w4


class WeightQuantLinear(NamedTuple):
    """Operands of `weight_quant_linear`."""

    x: Tensor  # [T, K]
    weight: Tensor  # [K, N/8] int32, as `graphs.quantise.pack_w4` gives it
    scale: Tensor  # [groups of K, N] f32


weight_quant_linear = Primitive("weight_quant_linear", WeightQuantLinear, factors="t _, _ n, _ n -> t n", like="x")


@weight_quant_linear.reference
def weight_quant_linear_reference(args: WeightQuantLinear) -> Tensor:
    """`x @ (weight * scale)`, the weight made a number of x's dtype before: scales are in that dtype, and the product is rounded to it.

    Returns:
        [T, N], dtype of x.
    """
    x, weight, scale = args
    groups = unpack_w4(weight).unflatten(0, (scale.shape[0], -1))
    floats = (groups.to(x.dtype) * scale.to(x.dtype)[:, None]).flatten(0, 1)
    return torch.mm(x, floats)


WHOLE_TILES = 32
"""Weights of a channel that kernels multiply at a time: a scale is of a multiple of these, or of all."""


def takes_groups(weight: Tensor, scale: Tensor) -> bool:
    """Whether kernels for CPUs multiply weights [..., K, N/8] with scales [..., groups of K, N]."""
    K, groups = weight.shape[-2], scale.shape[-2]
    return scale.dtype == torch.float32 and (groups == 1 or K % (groups * WHOLE_TILES) == 0)


_panels = Native(
    "npuc_linear_int4",
    weight_quant_linear.schema,
    weight_quant_linear.rule("abstract"),
    Packed((1,), "int4", weight_quant_linear.rule("reference")),
).op


@weight_quant_linear.lowering("inductor")
def weight_quant_linear_on_cpu(args: WeightQuantLinear) -> Any:
    """Weights stay int4 in memory and are widened in registers (lowering/cpp/linear_int4.cpp).

    The sum of each group is multiplied by its scale in float32, where the reference rounds every weight to the dtype of x before.
    """
    if args.x.dtype in (torch.bfloat16, torch.float32) and takes_groups(args.weight, args.scale):
        return _panels(*args)
    return weight_quant_linear_reference(args)


@weight_quant_linear.lowering("npu")
def _npu(args: WeightQuantLinear) -> Tensor:
    """One product; it takes scales in the dtype of the activations, which they get when they are loaded."""
    x, weight, scale = args
    size = x.shape[1] // scale.shape[0] if scale.shape[0] > 1 else 0
    out: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(x, weight, scale.to(x.dtype), antiquant_group_size=size)
    return out


@weight_quant_linear.cost
def _cost(args: WeightQuantLinear) -> Cost:
    x, weight, scale = args
    return Cost(2 * x.shape[0] * weight.numel() * NIBBLES, nbytes(*args), x.shape[0] * scale.shape[1] * x.dtype.itemsize)
