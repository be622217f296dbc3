"""Gated activations: the first half of a SwiGLU feed-forward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import products
from ..primitive import Cost, Primitive, nbytes
from .linear import Linear, linear_on_cpu


class SwigluLinear(NamedTuple):
    """Operands of `swiglu_linear`.

    The two halves of the weight are a dimension of their own, so that a shard of F holds the same channels of both.
    """

    x: Tensor  # [T, M]
    weight: Tensor  # [2, F, M], gate then up


swiglu_linear = Primitive("swiglu_linear", SwigluLinear, factors="t _, _ f _ -> t f", like="x")


@swiglu_linear.reference
def swiglu_linear_reference(args: SwigluLinear) -> Tensor:
    """`silu(x @ weight[0].T) * (x @ weight[1].T)` (arXiv:2002.05202).

    Returns:
        [T, F].
    """
    gate, up = products.linear(args.x, args.weight.flatten(0, 1)).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@swiglu_linear.lowering("inductor")
def _cpu(args: SwigluLinear) -> Tensor:
    gate, up = linear_on_cpu(Linear(args.x, args.weight.flatten(0, 1))).chunk(2, -1)
    gated: Tensor = torch.nn.functional.silu(gate) * up
    return gated


@swiglu_linear.lowering("npu")
def _npu(args: SwigluLinear) -> Any:
    npu = torch.ops.npu
    return npu.npu_swiglu(npu.npu_linear(args.x, args.weight.flatten(0, 1)))


@swiglu_linear.cost
def _cost(args: SwigluLinear) -> Cost:
    x, weight = args
    rows, width = x.shape[0], weight.shape[1]
    return Cost(2 * rows * weight.numel() + 5 * rows * width, nbytes(x, weight), rows * width * x.dtype.itemsize)
