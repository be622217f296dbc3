"""Product with one weight matrix."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import products
from ..native_ops import PANELS, Native, Packed
from ..primitive import Cost, Primitive, nbytes


class Linear(NamedTuple):
    """Operands of `linear`."""

    x: Tensor  # [T, K]
    weight: Tensor  # [N, K], same dtype


linear = Primitive("linear", Linear, factors="t k, n k -> t n; sum k", like="x")


@linear.reference
def linear_reference(args: Linear) -> Tensor:
    """`x @ weight.T`.

    Returns:
        [T, N].
    """
    return products.linear(args.x, args.weight)


_panels = {
    dtype: Native(f"npuc_linear_{kind}", linear.schema, linear.rule("abstract"), Packed((1,), kind, linear.rule("reference"))).op
    for dtype, kind in PANELS.items()
}


@linear.lowering("inductor")
def linear_on_cpu(args: Linear) -> Any:
    """A kernel for any number of rows, with weights that were packed when they were loaded (lowering/cpp/linear.cpp).

    A row's result is the same bit for bit whatever rows are beside it; torch sums in another order for another number of rows.
    """
    x, weight = args
    if x.dtype == weight.dtype and x.dtype in _panels:
        return _panels[x.dtype](x, weight)
    return linear_reference(args)


@linear.lowering("npu")
def _npu(args: Linear) -> Any:
    """One matrix product that takes the weight as it lies, without a transposed copy."""
    return torch.ops.npu.npu_linear(args.x, args.weight)


@linear.cost
def _cost(args: Linear) -> Cost:
    x, weight = args
    return Cost(2 * x.shape[0] * weight.numel(), nbytes(x, weight), x.shape[0] * weight.shape[0] * x.dtype.itemsize)
