"""Turns the calls that all members of a group make of a product fused with a collective into the result of each member.

Semantics: the operator documentation of Ascend/op-plugin. The product is rounded to the dtype of the activations before it is summed
over the members, so that each kernel is bit for bit the two operators that it stands for.
"""

from __future__ import annotations

from typing import Any

import torch

from ....graphs.errors import LoweringError
from .kernels_common import refuse_options, require
from .kernels_dense import npu_linear
from .kernels_group import Call, all_gather_into_tensor, all_reduce, reduce_scatter_tensor

# The device has these two alone; float32 is for what is compared here.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def npu_mm_reduce_scatter_base(calls: list[Call]) -> list[torch.Tensor]:
    """Each call: (x [M, K], x2 [K, N], group, size) and reduce_op "sum" -> [M / size, N], the member's rows of the sum of products.

    Raises:
        LoweringError: also when M does not divide by the members.
    """
    products = _products("npu_mm_reduce_scatter_base", calls)
    return reduce_scatter_tensor([((y, "sum", args[3], args[2]), {}) for y, (args, _) in zip(products, calls, strict=True)])


def npu_mm_all_reduce_base(calls: list[Call]) -> list[torch.Tensor]:
    """Each call: (x [M, K], x2 [K, N], group) and reduce_op "sum" -> [M, N], the sum of all members' products."""
    products = _products("npu_mm_all_reduce_base", calls)
    return all_reduce([((y, "sum", args[2]), {}) for y, (args, _) in zip(products, calls, strict=True)])


def npu_all_gather_base_mm(calls: list[Call]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each call: (x [M, K], x2 [K, N], group, size) and gather_output -> [size * M, N] and the gathered [size * M, K].

    Without gather_output the second is empty.
    """
    op = "npu_all_gather_base_mm"
    for _, options in calls:
        refuse_options(op, {name: value for name, value in options.items() if name != "gather_output"})
    wholes = all_gather_into_tensor([((args[0], args[3], args[2]), {}) for args, _ in calls])
    return [_gathered(op, whole, args, options) for whole, (args, options) in zip(wholes, calls, strict=True)]


def _gathered(op: str, whole: torch.Tensor, args: tuple[Any, ...], options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _product(op, whole, args[1]), whole if options.get("gather_output", True) else whole.new_empty(0)


def _products(op: str, calls: list[Call]) -> list[torch.Tensor]:
    for _, options in calls:
        if (how := options.get("reduce_op", "sum")) != "sum":
            raise LoweringError(f"{op}: reduce_op is {how!r}; legal is 'sum'")
        refuse_options(op, {name: value for name, value in options.items() if name != "reduce_op"})
    return [_product(op, args[0], args[1]) for args, _ in calls]


def _product(op: str, x: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    require(op, "input", x, _DTYPES, (2,))
    require(op, "x2", x2, (x.dtype,), (2,))
    if x.shape[1] != x2.shape[0]:
        raise LoweringError(f"{op}: input is {tuple(x.shape)} and x2 {tuple(x2.shape)}; legal is [M, K] and [K, N]")
    return npu_linear(x, x2.t())
