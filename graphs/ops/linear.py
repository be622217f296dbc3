"""Product with one weight matrix."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import products
from ..native_ops import FEW_ROWS, Native, Packed
from ..primitive import Cost, Primitive, nbytes


class Linear(NamedTuple):
    """Operands of `linear`."""

    x: Tensor  # [T, K]
    weight: Tensor  # [N, K], same dtype


linear = Primitive("linear", Linear, factors="t k, n k -> t n; sum k")


@linear.abstract
def _abstract(args: Linear) -> Tensor:
    x, weight = args
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


@linear.reference
def linear_reference(args: Linear) -> Tensor:
    """`x @ weight.T`.

    Returns:
        [T, N].
    """
    return products.linear(args.x, args.weight)


_few_rows = Native("npuc_linear", linear.schema, linear.rule("abstract")).op
_panels = Native("npuc_linear_bf16", linear.schema, linear.rule("abstract"), Packed((1,), "bf16", linear.rule("reference"))).op


@linear.lowering("inductor")
def linear_on_cpu(args: Linear) -> Any:
    """Kernels that read weights as fast as memory gives them: of few rows in float32 (lowering/cpp/linear.cpp), and in bfloat16 of
    any number of rows, with weights that were packed when they were loaded (lowering/cpp/linear_bf16.cpp).

    A row's result is the same bit for bit whatever rows are beside it; torch sums in another order for another number of rows.
    """
    x, weight = args
    if x.dtype == weight.dtype == torch.bfloat16:
        return _panels(x, weight)
    if x.shape[0] <= FEW_ROWS and x.dtype == weight.dtype == torch.float32:
        return _few_rows(x, weight)
    return linear_reference(args)


@linear.lowering("npu")
def _npu(args: Linear) -> Any:
    """One matrix product that takes the weight as it lies, without a transposed copy."""
    return torch.ops.npu.npu_linear(args.x, args.weight)


@linear.cost
def _cost(args: Linear) -> Cost:
    x, weight = args
    return Cost(2 * x.shape[0] * weight.numel(), nbytes(x, weight), x.shape[0] * weight.shape[0] * x.dtype.itemsize)
