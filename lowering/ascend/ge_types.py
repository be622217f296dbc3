"""Dtype, sizes and storage format of every tensor of a GE graph, known before any compiler reads the graph."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ...graphs.errors import LoweringError
from .ge_file import GeFile, messages
from .ge_operators import Operator, by_kind, read
from .nz_weights import weight_operands
from .operators.table import BY_TYPE
from .operators.tensor_type import BITS, DTYPES, ND, NZ, TensorType
from .operators.type_rules import UnknownTypeError

# Letters of `struct` for constants that sizes, axes and bounds are given in.
_CODES = {"i8": "b", "u8": "B", "i16": "h", "i32": "i", "i64": "q", "u64": "Q", "f32": "f", "f64": "d"}
_FORMATS = {"FRACTAL_NZ": NZ, "ND": ND}
_type = functools.cache(TensorType)


def tensor_types(ge_file: GeFile) -> dict[str, TensorType]:
    """Type of each tensor `name:port` of a GE file; operands that are stored in NZ when they are loaded say so.

    Raises:
        LoweringError: a type that an operator reads cannot be told; names the operator that gives it.
    """
    wanted = set(weight_operands(ge_file))
    ops, operands = read(ge_file.graph), ge_file.data
    nz = {f"{op.name}:0" for op in ops if op.type == "Data" and operands[op.attr["index"].i] in wanted}
    return graph_types(ops, nz)


def graph_types(ops: Sequence[Operator], nz: AbstractSet[str] = frozenset()) -> dict[str, TensorType]:
    """`tensor_types` of the operators of a graph of which the tensors in `nz` are stored in NZ.

    An output that nobody reads, that the graph does not declare and that has no rule (`NpuOperator.types`) is left out.
    """
    types: dict[str, TensorType] = {}
    wanted = {tensor for op in ops for tensor in op.input}
    known, constant, declared = _Graph(types), by_kind(_constant_type), by_kind(_declared)
    for op in ops:
        if op.type == "Const":
            known.constants[f"{op.name}:0"] = op
            types[f"{op.name}:0"] = constant(op)
        elif op.type == "Data":
            types[f"{op.name}:0"] = _operand(op, NZ if f"{op.name}:0" in nz else ND)
        else:
            _add(op, declared(op), types, known, wanted)
    return types


def _declared(op: Any) -> tuple[TensorType | None, ...]:
    """Types that the graph declares of an operator's outputs."""
    texts = (desc.attr["_meta"].s if "_meta" in desc.attr else b"" for desc in op.output_desc)
    return tuple(declared_type(text) if text else None for text in texts)


def _add(op: Any, declared: Sequence[TensorType | None], types: dict[str, TensorType], known: _Graph, wanted: AbstractSet[str]) -> None:
    if op.type in ("Pack", "ConcatV2", "Cast", "Identity"):
        known.lists[f"{op.name}:0"] = op
    operator = BY_TYPE.get(op.type)
    keeps = operator is not None and operator.keeps_format
    inferred: list[TensorType] | None = None
    for port, told in enumerate(declared):
        tensor = op.results[port]
        if told is not None:
            types[tensor] = _with_format(told, op, types) if keeps else told
            continue
        if inferred is None:
            inferred = _inferred(op, known, tensor in wanted)
        if port < len(inferred):
            types[tensor] = _with_format(inferred[port], op, types) if keeps else inferred[port]
        elif tensor in wanted:
            raise LoweringError(_untold(op, port))


def _inferred(op: Any, known: _Graph, needed: bool) -> list[TensorType]:
    operator = BY_TYPE.get(op.type)
    if operator is None or operator.types is None:
        if needed:
            raise LoweringError(_untold(op, 0))
        return []
    try:
        return [_type(dtype, shape) for dtype, shape in operator.types(op, known)]
    except UnknownTypeError as error:
        raise LoweringError(f"the type of {op.name} ({op.type}) cannot be told: {error}") from None


def _untold(op: Any, port: int) -> str:
    inferred = ", ".join(sorted(kind for kind, operator in BY_TYPE.items() if operator.types is not None))
    what = f"the type of output {port} of {op.name} ({op.type})"
    return f"{what} cannot be told: the graph does not declare it; it is inferred for {inferred}"


def _with_format(told: TensorType, op: Any, types: Mapping[str, TensorType]) -> TensorType:
    if "dst_format" in op.attr:
        name = op.attr["dst_format"].s.decode()
        return _type(told.dtype, told.shape, _FORMATS.get(name, name))
    layout = types[op.input[0]].format
    return told if layout == told.format else _type(told.dtype, told.shape, layout)


def _operand(op: Any, layout: str) -> TensorType:
    desc = op.output_desc[0]
    if "_meta" in desc.attr:
        told = declared_type(desc.attr["_meta"].s)
        return told if layout == ND else _type(told.dtype, told.shape, layout)
    return _type(_message_dtype(desc.dtype, op.name), tuple(desc.shape.dim), layout)


def _constant_type(op: Any) -> TensorType:
    desc = op.attr["value"].t.desc
    return _type(_message_dtype(desc.dtype, op.name), tuple(desc.shape.dim))


@functools.cache
def declared_type(text: bytes) -> TensorType:
    """The type that conversion wrote as `bf16[16,2]`.

    Raises:
        LoweringError: it is written in another way.
    """
    match = re.fullmatch(r"(\w+)\[((\d+(,\d+)*)?)\]", text.decode())
    if match is None or match[1] not in BITS:
        raise LoweringError(f"a tensor's type is written {text.decode()!r}; legal is e.g. 'bf16[16,2]', with a dtype of {', '.join(BITS)}")
    return TensorType(match[1], tuple(int(size) for size in match[2].split(",") if size))


@functools.cache
def _message_dtype(number: int, name: str) -> str:
    long = messages().DataType.Name(number)
    if long not in DTYPES:
        raise LoweringError(f"{name} is of dtype {long}; legal are {', '.join(DTYPES)}")
    return DTYPES[long]


class _Graph:
    """What rules may ask of the graph: types of tensors, and values of constant integers."""

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self._types = types
        self.constants: dict[str, Any] = {}
        self.lists: dict[str, Any] = {}

    def type(self, tensor: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and sizes of a tensor.

        Raises:
            UnknownTypeError: no operator before gives it.
        """
        if tensor not in self._types:
            raise UnknownTypeError(f"it reads {tensor}, whose type is not known")
        told = self._types[tensor]
        return told.dtype, told.shape

    def numbers(self, tensor: str) -> list[int | float]:
        """Values of a constant, or of an operator that lists constants.

        Raises:
            UnknownTypeError: they depend on the step.
        """
        if tensor in self.constants:
            return _values(self.constants[tensor])
        op = self.lists.get(tensor)
        if op is None:
            raise UnknownTypeError(f"it depends on the values of {tensor}, which are not constant")
        parts = op.input[: int(op.attr["N"].i)] if op.type in ("Pack", "ConcatV2") else op.input[:1]
        return [value for part in parts for value in self.numbers(part)]


def _values(op: Any) -> list[int | float]:
    message = op.attr["value"].t
    dtype = _message_dtype(message.desc.dtype, op.name)
    if dtype not in _CODES:
        raise UnknownTypeError(f"it depends on the constant {op.name} of {dtype}; legal are {', '.join(_CODES)}")
    return [value for (value,) in struct.iter_unpack(f"<{_CODES[dtype]}", message.data)]
