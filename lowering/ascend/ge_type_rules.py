"""Dtype and sizes of what GE operators give, for operators whose results conversion leaves undeclared.

A rule says what GE's own shape inference would; only a dtype and a shape are inferred, formats are not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...graphs.errors import LoweringError
from .inspect_ge import ATTRIBUTE_DTYPES

Shape = tuple[int, ...]
Typed = tuple[str, Shape]
"""Dtype as its short name, and sizes."""


class UnknownTypeError(LoweringError):
    """A result's type does not follow from what is known."""


class Known(Protocol):
    """What is known of the operators before one."""

    def type(self, tensor: str) -> Typed: ...

    def numbers(self, tensor: str) -> list[int | float]: ...


Rule = Callable[[Any, Known], list[Typed]]
"""`OpDef` message and what is known -> types of its outputs, at least of the first ones."""


def _inputs(op: Any, known: Known) -> list[Typed]:
    return [known.type(tensor) for tensor in op.input if tensor and not tensor.endswith(":-1")]


def _integers(known: Known, tensor: str) -> list[int]:
    return [int(value) for value in known.numbers(tensor)]


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that shapes broadcast to.

    Raises:
        UnknownTypeError: they do not.
    """
    rank = max(map(len, shapes))
    sizes = []
    for axis in range(-rank, 0):
        distinct = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(distinct) > 1:
            raise UnknownTypeError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
        sizes.append(distinct.pop() if distinct else 1)
    return tuple(sizes)


def _same(op: Any, known: Known) -> list[Typed]:
    return [known.type(op.input[0])]


def _one_dtype(typed: Sequence[Typed]) -> str:
    dtypes = {dtype for dtype, _ in typed}
    if len(dtypes) != 1:
        raise UnknownTypeError(f"its inputs are {', '.join(f'{dtype}{list(shape)}' for dtype, shape in typed)}; legal is one dtype")
    return dtypes.pop()


def _elementwise(op: Any, known: Known) -> list[Typed]:
    typed = _inputs(op, known)
    return [(_one_dtype(typed), broadcast([shape for _, shape in typed]))]


def _comparison(op: Any, known: Known) -> list[Typed]:
    return [("bool", _elementwise(op, known)[0][1])]


def _select(op: Any, known: Known) -> list[Typed]:
    condition, *values = _inputs(op, known)
    return [(_one_dtype(values), broadcast([condition[1], *(shape for _, shape in values)]))]


def _cast(op: Any, known: Known) -> list[Typed]:
    return [(_attribute_dtype(op, op.attr["dst_type"].i), known.type(op.input[0])[1])]


def _attribute_dtype(op: Any, number: int) -> str:
    if number not in ATTRIBUTE_DTYPES:
        raise UnknownTypeError(f"dtype number {number} is none of {sorted(ATTRIBUTE_DTYPES)}")
    return ATTRIBUTE_DTYPES[number]


def _bitcast(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    target = _attribute_dtype(op, op.attr["type"].dt)
    if (dtype, target) == ("i32", "i4"):
        if not op.attr["keep_dim"].b:
            return [(target, (*shape, 8))]
        return [(target, (*shape[:-1], shape[-1] * 8))]
    return [(target, shape)]


def _reshape(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    sizes = _integers(known, op.input[1])
    if sizes.count(-1) == 1:
        others = math.prod(size for size in sizes if size != -1)
        sizes = [size if size != -1 else math.prod(shape) // max(others, 1) for size in sizes]
    if math.prod(sizes) != math.prod(shape):
        raise UnknownTypeError(f"{dtype}{list(shape)} is reshaped to {sizes}, which has another number of elements")
    return [(dtype, tuple(sizes))]


def _unsqueeze(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    axes = list(op.attr["axes"].list.i)
    rank, sizes = len(shape) + len(axes), list(shape)
    for axis in sorted(axis % rank for axis in axes):
        sizes.insert(axis, 1)
    return [(dtype, tuple(sizes))]


def _squeeze(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    axes = [axis % len(shape) for axis in op.attr["axis"].list.i] or [i for i, size in enumerate(shape) if size == 1]
    return [(dtype, tuple(size for i, size in enumerate(shape) if i not in axes))]


def _transpose(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    return [(dtype, tuple(shape[axis] for axis in _integers(known, op.input[1])))]


def _fill(op: Any, known: Known) -> list[Typed]:
    return [(known.type(op.input[1])[0], tuple(_integers(known, op.input[0])))]


def _broadcast_to(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    sizes = _integers(known, op.input[1])
    own = [1] * (len(sizes) - len(shape)) + list(shape)
    return [(dtype, tuple(old if size == -1 else size for old, size in zip(own, sizes, strict=True)))]


def _range(op: Any, known: Known) -> list[Typed]:
    """Torchair passes the limit in int64 beside bounds of other dtypes; the result has the widest."""
    order = ("i32", "i64", "f16", "bf16", "f32", "f64")
    dtypes = [known.type(tensor)[0] for tensor in op.input[:3]]
    start, limit, delta = (known.numbers(tensor)[0] for tensor in op.input[:3])
    return [(max(dtypes, key=order.index), (max(0, math.ceil((limit - start) / delta)),))]


def _pack(op: Any, known: Known) -> list[Typed]:
    typed = _inputs(op, known)
    shape, axis = typed[0][1], op.attr["axis"].i
    axis %= len(shape) + 1
    return [(_one_dtype(typed), (*shape[:axis], len(typed), *shape[axis:]))]


def _concat(op: Any, known: Known) -> list[Typed]:
    """The axis is the last input of ConcatV2."""
    *parts, _ = _inputs(op, known)
    tensors = [tensor for tensor in op.input if tensor and not tensor.endswith(":-1")]
    shape = parts[0][1]
    axis = _integers(known, tensors[-1])[0] % len(shape)
    return [(_one_dtype(parts), (*shape[:axis], sum(part[axis] for _, part in parts), *shape[axis + 1 :]))]


def _reduce(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    axes = {axis % len(shape) for axis in _integers(known, op.input[1])} if shape else set()
    keep = op.attr["keep_dims"].b
    return [(dtype, tuple(1 if i in axes else size for i, size in enumerate(shape) if keep or i not in axes))]


def _arg_max_with_value(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    axis = op.attr["dimension"].i % len(shape)
    kept = (*shape[:axis], *((1,) if op.attr["keep_dims"].b else ()), *shape[axis + 1 :])
    return [("i32", kept), (dtype, kept)]


def _sort(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    return [(dtype, shape), ("i32", shape)]


def _top_k(op: Any, known: Known) -> list[Typed]:
    dtype, shape = known.type(op.input[0])
    axis = (op.attr["dim"].i if "dim" in op.attr else -1) % len(shape)
    kept = (*shape[:axis], _integers(known, op.input[1])[0], *shape[axis + 1 :])
    return [(dtype, kept), ("i32", kept)]


def _gather(op: Any, known: Known) -> list[Typed]:
    (dtype, shape), (_, index) = known.type(op.input[0]), known.type(op.input[1])
    axis = _integers(known, op.input[2])[0] % len(shape)
    batch = op.attr["batch_dims"].i
    return [(dtype, (*shape[:axis], *index[batch:], *shape[axis + 1 :]))]


def _indexed(op: Any, known: Known) -> list[Typed]:
    return [(known.type(op.input[0])[0], known.type(op.input[1])[1])]


def _product(first: str, second: str, op: Any, known: Known) -> list[Typed]:
    (dtype, left), (_, right) = known.type(op.input[0]), known.type(op.input[1])
    rows = left[-1] if op.attr[first].b else left[-2]
    columns = right[-2] if op.attr[second].b else right[-1]
    return [(dtype, (*broadcast([left[:-2] or (1,), right[:-2] or (1,)])[: max(len(left), len(right)) - 2], rows, columns))]


_UNARY = (
    "Abs", "Neg", "Cos", "Sin", "Exp", "Log", "Log1p", "Sqrt", "Rsqrt", "Square", "Reciprocal", "Sigmoid", "Swish", "Softplus", "Tanh",
    "Relu", "Floor", "Ceil", "Sign", "LogicalNot", "Muls", "Adds", "Identity", "TensorMove", "TransData", "SoftmaxV2", "Cumsum",
    "ZerosLike", "OnesLike", "ClipByValueV2", "MaskedFill", "HcomAllReduce", "HcomBroadcast", "ScatterNdUpdate", "Assign",
)  # fmt: skip
_BINARY = (
    "Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "FloorDiv", "FloorMod", "Pow", "Maximum", "Minimum", "LogicalAnd", "LogicalOr",
    "BitwiseAnd",
)  # fmt: skip
_COMPARISONS = ("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY, _same),
    **dict.fromkeys(_BINARY, _elementwise),
    **dict.fromkeys(_COMPARISONS, _comparison),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceAny", "ReduceAll"), _reduce),
    **dict.fromkeys(("MatMul", "MatMulV2", "MatMulV3"), functools.partial(_product, "transpose_x1", "transpose_x2")),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2"), functools.partial(_product, "adj_x1", "adj_x2")),
    "SelectV2": _select,
    "Cast": _cast,
    "Bitcast": _bitcast,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Fill": _fill,
    "BroadcastTo": _broadcast_to,
    "Range": _range,
    "Pack": _pack,
    "ConcatV2": _concat,
    "ArgMaxWithValue": _arg_max_with_value,
    "Sort": _sort,
    "TopKV2": _top_k,
    "GatherV2": _gather,
    "GatherElements": _indexed,
}
"""Types of the outputs by type of operator."""
