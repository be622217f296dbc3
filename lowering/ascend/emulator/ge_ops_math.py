"""GE's elementwise operators, reductions, matrix products and sorts, as functions over torch tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....graphs.errors import LoweringError
from .ge_ops_common import Call, Function, Results, binary, same_dtype, unary

Reduction = Callable[[torch.Tensor, list[int], bool], torch.Tensor]


def _floats(function: Callable[[torch.Tensor], torch.Tensor], **legal: Any) -> Function:
    """An operator of a float `x`, in float32 and rounded once; `legal` are the only values of its attributes."""

    def run(call: Call) -> Results:
        call.expect(**legal)
        x = call.tensor("x")
        if not x.is_floating_point():
            raise LoweringError(f"{call.op} takes {x.dtype}; legal are floats")
        return function(x.float()).to(x.dtype)

    return run


def _logical(name: str) -> Function:
    def run(call: Call) -> Results:
        x1, x2 = call.tensor("x1"), call.tensor("x2")
        if {x1.dtype, x2.dtype} != {torch.bool}:
            raise LoweringError(f"{call.op} takes {x1.dtype} and {x2.dtype}; legal is bool")
        return x1 | x2 if name == "or" else x1 & x2

    return run


def _logical_not(call: Call) -> Results:
    x = call.tensor("x")
    if x.dtype != torch.bool:
        raise LoweringError(f"{call.op} takes {x.dtype}; legal is bool")
    return ~x


def _cast(call: Call) -> Results:
    return call.tensor("x").to(call.dtype("dst_type"))


def _muls(call: Call) -> Results:
    x = call.tensor("x")
    if not x.is_floating_point():
        raise LoweringError(f"{call.op} takes {x.dtype}; legal are floats, as the factor is one")
    return (x.float() * float(call.attr("value"))).to(x.dtype)


def _addcmul(call: Call) -> Results:
    tensors = {name: call.tensor(name) for name in ("input_data", "x1", "x2", "value")}
    same_dtype(call, **tensors)
    if tensors["value"].numel() != 1:
        raise LoweringError(f"{call.op}: value is {tuple(tensors['value'].shape)}; legal is one number")
    return torch.addcmul(tensors["input_data"], tensors["x1"], tensors["x2"], value=tensors["value"].item())


def _clip(call: Call) -> Results:
    x, low, high = call.tensor("x"), call.tensor("clip_value_min"), call.tensor("clip_value_max")
    same_dtype(call, x=x, clip_value_min=low, clip_value_max=high)
    return torch.minimum(torch.maximum(x, low), high)


def _select(call: Call) -> Results:
    condition, then, other = call.tensor("condition"), call.tensor("then"), call.tensor("else")
    same_dtype(call, then=then, other=other)
    if condition.dtype != torch.bool:
        raise LoweringError(f"{call.op}: condition is {condition.dtype}; legal is bool")
    return torch.where(condition, then, other)


def _masked_fill(call: Call) -> Results:
    x, mask, value = call.tensor("x"), call.tensor("mask"), call.tensor("value")
    same_dtype(call, x=x, value=value)
    if value.numel() != 1 or mask.dtype != torch.bool:
        raise LoweringError(f"{call.op}: mask is {mask.dtype}, value {tuple(value.shape)}; legal are bool and one number")
    return x.masked_fill(mask, value.reshape(()))


def _softplus(call: Call) -> Results:
    x, beta, threshold = call.tensor("x"), call.attr("beta", 1.0), call.attr("threshold", 20.0)
    if not x.is_floating_point():
        raise LoweringError(f"{call.op} takes {x.dtype}; legal are floats")
    return torch.nn.functional.softplus(x.float(), beta, threshold).to(x.dtype)


def _real_div(call: Call) -> Results:
    x1, x2 = call.tensor("x1"), call.tensor("x2")
    same_dtype(call, x1=x1, x2=x2)
    if not x1.is_floating_point():
        raise LoweringError(f"{call.op} takes {x1.dtype}; legal are floats: GE gives the dtype of what it takes")
    return x1 / x2


def _reduce(function: Reduction) -> Function:
    """An operator of `x` and `axes`; it gives the dtype of x."""

    def run(call: Call) -> Results:
        x, axes, keep = call.tensor("x"), call.integers("axes"), bool(call.attr("keep_dims", False))
        # Empty axes mean different things in these operators, and are refused; attribute noop_with_empty_axes is about them only.
        call.ignore("noop_with_empty_axes")
        if not axes:
            raise LoweringError(f"{call.op} has no axes; legal is one or more")
        return function(x, axes, keep).to(x.dtype)

    return run


def _sum(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    return x.sum(axes, keepdim=keep)


def _mean(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    return x.mean(axes, keepdim=keep)


def _max(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    return x.amax(axes, keepdim=keep)


def _min(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    return x.amin(axes, keepdim=keep)


def _any(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    return x.bool().any(axes, keepdim=keep)


def _all(x: torch.Tensor, axes: list[int], keep: bool) -> torch.Tensor:
    return x.bool().all(axes, keepdim=keep)


def _cumsum(call: Call) -> Results:
    call.expect(exclusive=False, reverse=False)
    x = call.tensor("x")
    return x.cumsum(call.integer("axis"), dtype=x.dtype)


def _arg_max(call: Call) -> Results:
    return _first_max(call.tensor("x"), call.integer("dimension"), keep=False).to(call.dtype("dtype", 9))


def _arg_max_with_value(call: Call) -> Results:
    x, dim, keep = call.tensor("x"), call.attr("dimension"), bool(call.attr("keep_dims", False))
    return _first_max(x, dim, keep).int(), x.amax(dim, keepdim=keep)


def _first_max(x: torch.Tensor, dim: int, keep: bool) -> torch.Tensor:
    """Of equal maxima the first."""
    return x.argmax(dim, keepdim=keep)


def _sort(call: Call) -> Results:
    # Always stable: one of the orders that an unstable sort may give.
    call.ignore("stable")
    values, order = call.tensor("x").sort(dim=call.attr("axis", -1), descending=bool(call.attr("descending", False)), stable=True)
    return values, order.int()


def _top_k(call: Call) -> Results:
    # GE may return any of equal values, and unsorted ones in any order; here the order is that of a stable sort.
    call.ignore("sorted", "sort_policy")
    x, k, dim = call.tensor("x"), call.integer("k"), call.attr("dim", -1)
    if not 0 <= k <= x.shape[dim]:
        raise LoweringError(f"{call.op}: {k} of {tuple(x.shape)} along {dim}; legal are at most all")
    values, order = x.sort(dim=dim, descending=bool(call.attr("largest", True)), stable=True)
    return values.narrow(dim, 0, k), order.narrow(dim, 0, k).int()


def _softmax(call: Call) -> Results:
    call.expect(half_to_float=False)
    x, axes = call.tensor("x"), call.attr("axes", [-1])
    if len(axes) != 1:
        raise LoweringError(f"{call.op}: axes are {axes}; legal is one")
    return x.float().softmax(axes[0]).to(x.dtype)


def _mat_mul(first: str, second: str, dims: int | None) -> Function:
    """`x1` by `x2`, summed in float32; the attributes `first` and `second` say which of them is transposed."""

    def run(call: Call) -> Results:
        call.ignore("offset_x", "enable_hf32")
        x1, x2, bias = call.tensor("x1"), call.tensor("x2"), call.optional("bias")
        same_dtype(call, x1=x1, x2=x2)
        if not x1.is_floating_point() or (dims and (x1.dim(), x2.dim()) != (dims, dims)):
            raise LoweringError(
                f"{call.op} takes {tuple(x1.shape)} {x1.dtype} by {tuple(x2.shape)}; legal are {dims or 'any'} dimensions, floats"
            )
        a = x1.mT if call.attr(first, False) else x1
        b = x2.mT if call.attr(second, False) else x2
        y = a.float() @ b.float()
        return (y if bias is None else y + bias.float()).to(x1.dtype)

    return run


MATH: Mapping[str, Function] = {
    "Abs": unary(torch.abs),
    "Neg": unary(torch.neg),
    "Cos": _floats(torch.cos),
    "Sin": _floats(torch.sin),
    "Exp": _floats(torch.exp, base=-1.0, scale=1.0, shift=0.0),
    "Log": _floats(torch.log, base=-1.0, scale=1.0, shift=0.0),
    "Log1p": _floats(torch.log1p),
    "Sqrt": _floats(torch.sqrt),
    "Rsqrt": _floats(torch.rsqrt),
    "Square": _floats(torch.square),
    "Reciprocal": _floats(torch.reciprocal),
    "Sigmoid": _floats(torch.sigmoid),
    "Swish": _floats(torch.nn.functional.silu, scale=1.0),
    "Softplus": _floats(torch.nn.functional.softplus),
    "SoftplusV2": _softplus,
    "Tanh": _floats(torch.tanh),
    "Relu": unary(torch.relu),
    "Floor": unary(torch.floor),
    "Ceil": unary(torch.ceil),
    "Sign": unary(torch.sign),
    "Add": binary(torch.add),
    "AddV2": binary(torch.add),
    "Sub": binary(torch.sub),
    "Mul": binary(torch.mul),
    "RealDiv": _real_div,
    "FloorDiv": binary(functools.partial(torch.div, rounding_mode="floor")),
    "FloorMod": binary(torch.remainder),
    "Pow": binary(torch.pow),
    "Maximum": binary(torch.maximum),
    "Minimum": binary(torch.minimum),
    "Equal": binary(torch.eq),
    "NotEqual": binary(torch.ne),
    "Less": binary(torch.lt),
    "LessEqual": binary(torch.le),
    "Greater": binary(torch.gt),
    "GreaterEqual": binary(torch.ge),
    "BitwiseAnd": binary(torch.bitwise_and),
    "LogicalAnd": _logical("and"),
    "LogicalOr": _logical("or"),
    "LogicalNot": _logical_not,
    "Muls": _muls,
    "Addcmul": _addcmul,
    "Cast": _cast,
    "ClipByValueV2": _clip,
    "SelectV2": _select,
    "MaskedFill": _masked_fill,
    "ReduceSum": _reduce(_sum),
    "ReduceMean": _reduce(_mean),
    "ReduceMax": _reduce(_max),
    "ReduceMin": _reduce(_min),
    "ReduceAny": _reduce(_any),
    "ReduceAll": _reduce(_all),
    "Cumsum": _cumsum,
    "ArgMaxV2": _arg_max,
    "ArgMaxWithValue": _arg_max_with_value,
    "Sort": _sort,
    "TopKV2": _top_k,
    "SoftmaxV2": _softmax,
    "MatMul": _mat_mul("transpose_x1", "transpose_x2", 2),
    "MatMulV2": _mat_mul("transpose_x1", "transpose_x2", 2),
    "BatchMatMul": _mat_mul("adj_x1", "adj_x2", None),
    "BatchMatMulV2": _mat_mul("adj_x1", "adj_x2", None),
}
"""Functions of one rank by type of operator."""
