"""Elementwise operators, reductions and sorts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ....graphs.errors import LoweringError
from . import type_rules, work
from .call import Call, Function, Results, binary, form, same_dtype, unary
from .checks import FLOATS, require
from .record import Converter, NpuOperator, TorchForm
from .trials import ANY_INTEGERS, DISTINCT, LARGE, POSITIVE, Trial

Reduction = Callable[..., torch.Tensor]
"""Takes a tensor and its axes, and `keepdim`."""


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


def npu_gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """x of floats -> `x * Phi(x)`, exact ("none") or with a hyperbolic tangent ("tanh"); in float32, rounded once."""
    wide = require("npu_gelu", "self", x, FLOATS).float()
    return torch.nn.functional.gelu(wide, approximate=approximate).to(x.dtype)


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
        return function(x, axes, keepdim=keep).to(x.dtype)

    return run


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


_DT_BOOL, _DT_INT64 = 12, 9
_REDUCED = (0, 1, 2, 4, 27)
"""Numbers of the dtypes that maxima and minima are taken in."""
_HALVES = (1, 27)
"""Numbers of float16 and bfloat16 in GE."""


def _convert_mul(ta: Any, earlier: Any) -> Any:
    """torchair casts every product to the dtype that it has already, because its operator Mul states none."""
    promote = ta.torchair._ge_concrete_graph.utils.dtype_promote

    def convert(x: Any, other: Any, meta_outputs: Any = None) -> Any:
        if meta_outputs.dtype == _DT_BOOL:
            raise LoweringError("aten.mul of bools has no converter; legal are numbers, and `&` of bools")
        if isinstance(other, int | float) and x.dtype in _HALVES:
            # Muls takes the factor in float32, as torch does; a constant operand would round it to the dtype of x.
            return ta.ge.Muls(x, value=other)
        return ta.ge.Mul(*promote(x, other, target_dtype=meta_outputs.dtype))

    return convert


def _convert_softplus(ta: Any, earlier: Any) -> Any:
    """torchair has the operator and no converter."""

    def convert(x: Any, beta: float = 1, threshold: float = 20, meta_outputs: Any = None) -> Any:
        return ta.ge.SoftplusV2(x, beta=float(beta), threshold=float(threshold))

    return convert


def _convert_extreme(kind: str) -> Converter:
    """torchair has the operators, and converts neither `amax` nor `amin`.

    ReduceMax and ReduceMin take float16, bfloat16, float32, int8 and uint8 (their definitions in the reduce_ops.h of CANN's operator
    prototypes); integers of other sizes are refused here, since GE would compute them on the host's CPU cores of the device.
    """

    def converter(ta: Any, earlier: Any) -> Any:
        def convert(x: Any, dim: Any = (), keepdim: bool = False, meta_outputs: Any = None) -> Any:
            if x.dtype not in _REDUCED:
                raise LoweringError(
                    f"{kind} takes GE's dtype number {x.dtype}; legal are {_REDUCED}: float32, float16, int8, uint8, bfloat16"
                )
            dims = [dim] if isinstance(dim, int) else list(dim) or list(range(x.rank))
            return getattr(ta.ge, kind)(x, ta.ge.Const(dims, dtype=_DT_INT64), keep_dims=keepdim)

        return convert

    return converter


def _like_first(kind: str, run: Function | None, passes: float = 0.0, trial: Trial = ANY_INTEGERS, **more: Any) -> NpuOperator:
    rule = functools.partial(work.generic, passes=passes) if passes else None
    return NpuOperator((kind,), run=run, types=type_rules.same, work=rule, trial=trial, **more)


def _broadcast(kinds: str, run: Function, trial: Trial = ANY_INTEGERS, **more: Any) -> NpuOperator:
    return NpuOperator(tuple(kinds.split()), run=run, types=type_rules.elementwise, trial=trial, **more)


def _comparison(kind: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> NpuOperator:
    return NpuOperator((kind,), run=binary(function), types=type_rules.comparison, trial=ANY_INTEGERS)


def _reduction(kind: str, function: Reduction, **more: Any) -> NpuOperator:
    return NpuOperator((kind,), run=_reduce(function), types=type_rules.reduce, trial=ANY_INTEGERS, **more)


_DIVISION = Trial(positive=("x2",), any_integers=True)
OPERATORS = (
    _like_first("Abs", unary(torch.abs)),
    _like_first("Neg", unary(torch.neg)),
    _like_first("Cos", _floats(torch.cos)),
    _like_first("Sin", _floats(torch.sin)),
    _like_first(
        "Exp", _floats(torch.exp, base=-1.0, scale=1.0, shift=0.0), trial=Trial(floats=lambda slot, drawn: drawn.clamp(-LARGE, 8.0))
    ),
    _like_first("Log", _floats(torch.log, base=-1.0, scale=1.0, shift=0.0), trial=POSITIVE),
    _like_first("Log1p", _floats(torch.log1p), trial=POSITIVE),
    _like_first("Sqrt", _floats(torch.sqrt), trial=POSITIVE),
    _like_first("Rsqrt", _floats(torch.rsqrt), trial=POSITIVE),
    _like_first("Square", _floats(torch.square)),
    _like_first("Reciprocal", _floats(torch.reciprocal), trial=POSITIVE),
    _like_first("Sigmoid", _floats(torch.sigmoid)),
    _like_first("Swish", _floats(torch.nn.functional.silu, scale=1.0)),
    _like_first("Softplus", _floats(torch.nn.functional.softplus)),
    NpuOperator(("SoftplusV2",), run=_softplus, converters={"aten.softplus.default": _convert_softplus}),
    # torchair's converter of aten.gelu takes another operator, Gelu, which has the second formula alone.
    NpuOperator(
        ("GeluV2",),
        torch=(TorchForm("npu.npu_gelu.default", npu_gelu),),
        run=form(npu_gelu, "x", attributes={"approximate": "none"}),
        types=type_rules.same,
        widens=True,
        work=functools.partial(work.generic, passes=8.0),
    ),
    _like_first("Tanh", _floats(torch.tanh)),
    _like_first("Relu", unary(torch.relu)),
    _like_first("Floor", unary(torch.floor)),
    _like_first("Ceil", unary(torch.ceil)),
    _like_first("Sign", unary(torch.sign)),
    _broadcast("Add AddV2", binary(torch.add)),
    _broadcast("Sub", binary(torch.sub)),
    _broadcast("Mul", binary(torch.mul), converters={"aten.mul.Tensor": _convert_mul}),
    _broadcast("RealDiv", _real_div, Trial(positive=("x2",))),
    _broadcast("FloorDiv", binary(functools.partial(torch.div, rounding_mode="floor")), _DIVISION),
    _broadcast("FloorMod", binary(torch.remainder), _DIVISION),
    _broadcast("Pow", binary(torch.pow), Trial(floats=lambda slot, drawn: drawn.abs().clamp(0.1, 8.0))),
    _broadcast("Maximum", binary(torch.maximum)),
    _broadcast("Minimum", binary(torch.minimum)),
    _comparison("Equal", torch.eq),
    _comparison("NotEqual", torch.ne),
    _comparison("Less", torch.lt),
    _comparison("LessEqual", torch.le),
    _comparison("Greater", torch.gt),
    _comparison("GreaterEqual", torch.ge),
    _broadcast("BitwiseAnd", binary(torch.bitwise_and)),
    _broadcast("LogicalAnd", _logical("and")),
    _broadcast("LogicalOr", _logical("or")),
    _like_first("LogicalNot", _logical_not),
    _like_first("Muls", _muls),
    NpuOperator(("Addcmul",), run=_addcmul),
    NpuOperator(
        ("Cast",),
        torch=(TorchForm("aten._to_copy.default"),),
        run=_cast,
        types=type_rules.cast,
        copies=1,
        casts="dst_type",
        trial=ANY_INTEGERS,
    ),
    _like_first("ClipByValueV2", _clip),
    NpuOperator(("SelectV2",), run=_select, types=type_rules.select, trial=ANY_INTEGERS),
    _like_first("MaskedFill", _masked_fill),
    _reduction("ReduceSum", torch.sum),
    _reduction("ReduceMean", torch.mean),
    _reduction("ReduceMax", torch.amax, converters={"aten.amax.default": _convert_extreme("ReduceMax")}),
    _reduction("ReduceMin", torch.amin, converters={"aten.amin.default": _convert_extreme("ReduceMin")}),
    _reduction("ReduceAny", torch.any),
    _reduction("ReduceAll", torch.all),
    _like_first("Cumsum", _cumsum),
    NpuOperator(("ArgMaxV2",), run=_arg_max, trial=DISTINCT),
    NpuOperator(("ArgMaxWithValue",), run=_arg_max_with_value, types=type_rules.arg_max_with_value, trial=DISTINCT),
    NpuOperator(("Sort",), acl=("aclnnSort",), run=_sort, types=type_rules.sort, work=work.sorting, trial=DISTINCT),
    NpuOperator(("TopKV2",), acl=("aclnnTopk",), run=_top_k, types=type_rules.top_k, work=work.sorting, trial=DISTINCT),
    _like_first("SoftmaxV2", _softmax, passes=6.0, time=work.KernelTime(1.5e-5)),
)
