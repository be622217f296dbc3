"""Dtype and sizes of what GE operators give, for operators whose results conversion leaves undeclared.

A rule says what GE's own shape inference would; only a dtype and a shape are inferred, formats are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ....graphs.errors import LoweringError
from .tensor_type import ATTRIBUTE_DTYPES, BITS

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


def same(op: Any, known: Known) -> list[Typed]:
    """The type of the first input."""
    return [known.type(op.input[0])]


def _one_dtype(typed: Sequence[Typed]) -> str:
    dtypes = {dtype for dtype, _ in typed}
    if len(dtypes) != 1:
        raise UnknownTypeError(f"its inputs are {', '.join(f'{dtype}{list(shape)}' for dtype, shape in typed)}; legal is one dtype")
    return dtypes.pop()


def elementwise(op: Any, known: Known) -> list[Typed]:
    """Inputs of one dtype, broadcast."""
    typed = _inputs(op, known)
    return [(_one_dtype(typed), broadcast([shape for _, shape in typed]))]


def comparison(op: Any, known: Known) -> list[Typed]:
    """Booleans, broadcast."""
    return [("bool", elementwise(op, known)[0][1])]


def select(op: Any, known: Known) -> list[Typed]:
    """The two values behind a condition, broadcast with it."""
    condition, *values = _inputs(op, known)
    return [(_one_dtype(values), broadcast([condition[1], *(shape for _, shape in values)]))]


def cast(op: Any, known: Known) -> list[Typed]:
    """The dtype that attribute `dst_type` numbers."""
    return [(_attribute_dtype(op, op.attr["dst_type"].i), known.type(op.input[0])[1])]


def _attribute_dtype(op: Any, number: int) -> str:
    if number not in ATTRIBUTE_DTYPES:
        raise UnknownTypeError(f"dtype number {number} is none of {sorted(ATTRIBUTE_DTYPES)}")
    return ATTRIBUTE_DTYPES[number]


def bitcast(op: Any, known: Known) -> list[Typed]:
    """The dtype that attribute `type` numbers, of smaller ones in a dimension of their own; an int32 is eight int4."""
    dtype, shape = known.type(op.input[0])
    target = _attribute_dtype(op, op.attr["type"].dt)
    if (dtype, target) == ("i32", "i4"):
        if not op.attr["keep_dim"].b:
            return [(target, (*shape, 8))]
        return [(target, (*shape[:-1], shape[-1] * 8))]
    parts = BITS[dtype] // BITS[target]
    return [(target, (*shape, parts) if parts > 1 else shape)]


def reshape(op: Any, known: Known) -> list[Typed]:
    """The sizes in the second input, of which one may be -1."""
    dtype, shape = known.type(op.input[0])
    sizes = _integers(known, op.input[1])
    if sizes.count(-1) == 1:
        others = math.prod(size for size in sizes if size != -1)
        sizes = [size if size != -1 else math.prod(shape) // max(others, 1) for size in sizes]
    if math.prod(sizes) != math.prod(shape):
        raise UnknownTypeError(f"{dtype}{list(shape)} is reshaped to {sizes}, which has another number of elements")
    return [(dtype, tuple(sizes))]


def unsqueeze(op: Any, known: Known) -> list[Typed]:
    """Axes of size 1 where attribute `axes` says."""
    dtype, shape = known.type(op.input[0])
    axes = list(op.attr["axes"].list.i)
    rank, sizes = len(shape) + len(axes), list(shape)
    for axis in sorted(axis % rank for axis in axes):
        sizes.insert(axis, 1)
    return [(dtype, tuple(sizes))]


def squeeze(op: Any, known: Known) -> list[Typed]:
    """Without the axes of size 1 that attribute `axis` names, or without all."""
    dtype, shape = known.type(op.input[0])
    axes = [axis % len(shape) for axis in op.attr["axis"].list.i] or [i for i, size in enumerate(shape) if size == 1]
    return [(dtype, tuple(size for i, size in enumerate(shape) if i not in axes))]


def transpose(op: Any, known: Known) -> list[Typed]:
    """Axes in the order of the second input."""
    dtype, shape = known.type(op.input[0])
    return [(dtype, tuple(shape[axis] for axis in _integers(known, op.input[1])))]


def fill_of(op: Any, known: Known) -> list[Typed]:
    """The sizes in the first input, and the dtype of the second."""
    return [(known.type(op.input[1])[0], tuple(_integers(known, op.input[0])))]


def broadcast_to(op: Any, known: Known) -> list[Typed]:
    """The sizes in the second input; -1 keeps one."""
    dtype, shape = known.type(op.input[0])
    sizes = _integers(known, op.input[1])
    own = [1] * (len(sizes) - len(shape)) + list(shape)
    return [(dtype, tuple(old if size == -1 else size for old, size in zip(own, sizes, strict=True)))]


def range_of(op: Any, known: Known) -> list[Typed]:
    """Torchair passes the limit in int64 beside bounds of other dtypes; the result has the widest."""
    order = ("i32", "i64", "f16", "bf16", "f32", "f64")
    dtypes = [known.type(tensor)[0] for tensor in op.input[:3]]
    start, limit, delta = (known.numbers(tensor)[0] for tensor in op.input[:3])
    return [(max(dtypes, key=order.index), (max(0, math.ceil((limit - start) / delta)),))]


def pack(op: Any, known: Known) -> list[Typed]:
    """A new axis of the number of inputs."""
    typed = _inputs(op, known)
    shape, axis = typed[0][1], op.attr["axis"].i
    axis %= len(shape) + 1
    return [(_one_dtype(typed), (*shape[:axis], len(typed), *shape[axis:]))]


def concat(op: Any, known: Known) -> list[Typed]:
    """The axis is the last input of ConcatV2."""
    *parts, _ = _inputs(op, known)
    tensors = [tensor for tensor in op.input if tensor and not tensor.endswith(":-1")]
    shape = parts[0][1]
    axis = _integers(known, tensors[-1])[0] % len(shape)
    return [(_one_dtype(parts), (*shape[:axis], sum(part[axis] for _, part in parts), *shape[axis + 1 :]))]


def reduce(op: Any, known: Known) -> list[Typed]:
    """Without the axes in the second input, or with size 1 there."""
    dtype, shape = known.type(op.input[0])
    axes = {axis % len(shape) for axis in _integers(known, op.input[1])} if shape else set()
    keep = op.attr["keep_dims"].b
    return [(dtype, tuple(1 if i in axes else size for i, size in enumerate(shape) if keep or i not in axes))]


def arg_max_with_value(op: Any, known: Known) -> list[Typed]:
    """Positions and maxima along attribute `dimension`."""
    dtype, shape = known.type(op.input[0])
    axis = op.attr["dimension"].i % len(shape)
    kept = (*shape[:axis], *((1,) if op.attr["keep_dims"].b else ()), *shape[axis + 1 :])
    return [("i32", kept), (dtype, kept)]


def sort(op: Any, known: Known) -> list[Typed]:
    """Values and their positions."""
    dtype, shape = known.type(op.input[0])
    return [(dtype, shape), ("i32", shape)]


def top_k(op: Any, known: Known) -> list[Typed]:
    """As many values as the second input says, and their positions."""
    dtype, shape = known.type(op.input[0])
    axis = (op.attr["dim"].i if "dim" in op.attr else -1) % len(shape)
    kept = (*shape[:axis], _integers(known, op.input[1])[0], *shape[axis + 1 :])
    return [(dtype, kept), ("i32", kept)]


def gather(op: Any, known: Known) -> list[Typed]:
    """The first input with the sizes of the indices in place of the axis."""
    (dtype, shape), (_, index) = known.type(op.input[0]), known.type(op.input[1])
    axis = _integers(known, op.input[2])[0] % len(shape)
    batch = op.attr["batch_dims"].i
    return [(dtype, (*shape[:axis], *index[batch:], *shape[axis + 1 :]))]


def indexed(op: Any, known: Known) -> list[Typed]:
    """The dtype of the first input, the sizes of the second."""
    return [(known.type(op.input[0])[0], known.type(op.input[1])[1])]


def product(op: Any, known: Known, first: str = "transpose_x1", second: str = "transpose_x2") -> list[Typed]:
    """A matrix product; attributes `first` and `second` say which matrix is transposed."""
    (dtype, left), (_, right) = known.type(op.input[0]), known.type(op.input[1])
    rows = left[-1] if op.attr[first].b else left[-2]
    columns = right[-2] if op.attr[second].b else right[-1]
    return [(dtype, (*broadcast([left[:-2] or (1,), right[:-2] or (1,)])[: max(len(left), len(right)) - 2], rows, columns))]
