"""A matrix product of each head by itself."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import products
from ..primitive import Cost, Primitive, nbytes


class HeadLinear(NamedTuple):
    """Operands of `head_linear`."""

    x: Tensor  # [T, H, K]
    weight: Tensor  # [H, K, N]


head_linear = Primitive("head_linear", HeadLinear, factors="t h _, h _ _ -> t h _")


@head_linear.abstract
def _abstract(args: HeadLinear) -> Tensor:
    return torch.empty((*args.x.shape[:2], args.weight.shape[2]), dtype=args.x.dtype, device=args.x.device)


@head_linear.reference
def head_linear_reference(args: HeadLinear) -> Tensor:
    """`x[t, h] @ weight[h]`.

    Returns:
        [T, H, N], dtype of x.
    """
    return products.bmm(args.x.transpose(0, 1), args.weight).transpose(0, 1).contiguous()


head_linear.lowering("npu")(head_linear_reference)


@head_linear.cost
def _cost(args: HeadLinear) -> Cost:
    T, H, K = args.x.shape
    N = args.weight.shape[2]
    return Cost(2 * T * H * K * N, nbytes(args.x, args.weight), T * H * N * args.x.dtype.itemsize)
