"""Replaces the declarations of float matrices by those of the tensors that they are stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from ...graphs import tree
from ...graphs.errors import CheckpointError, ModelError, SpecError
from ...graphs.quantise import NIBBLES, unpack_columns, unpack_rows
from ...graphs.types import Tree
from ..params import NUMBERS, Padded, Param, Parts, Picked, Placed, Source, SourceAxis, axis_name
from . import leaves
from .formats import FLOAT, INT4, W4A8_DYNAMIC, W4A16, W8A8, W8A8_DYNAMIC, Formats, sibling
from .leaves import DeclaredMatrix
from .parts import apart

NORM = "norm"
"""Role of a norm's weight."""

ROLES = {"column": (0, False), "row": (0, True), "experts": (1, False), "experts_down": (1, True)}
"""Role of a matrix (`Param.role`) -> dimensions in front that count matrices, and whether ranks share its contraction."""

EXPERT_FORMATS = (FLOAT, W8A8_DYNAMIC, W4A8_DYNAMIC, W4A16)


class StoredFormats(Protocol):
    """How a deployment stores matrices; `models.variant.Variant` is one."""

    @property
    def formats(self) -> Formats: ...
    @property
    def grouped(self) -> bool: ...
    @property
    def padded(self) -> tuple[tuple[str, int], ...]: ...
    def parts(self, axis: str | None) -> int:
        """Over how many ranks a logical axis is split."""
        ...


def stored(params: Tree, storage: StoredFormats) -> Tree:
    """A tree of Param as it is stored: a matrix that is not float becomes a mapping of Param, as do experts for grouped products.

    So does a matrix or a norm that has a bias: the mapping has it as `bias`. A matrix of tensors in different formats becomes a list of its
    parts (parts.py), each stored as a matrix is.

    Raises:
        CheckpointError: matrices that are multiplied as one have different formats and cannot be taken apart, groups do not fill a
            contraction, or a matrix that ranks may split along its contraction has a bias.
        SpecError: a matrix cannot have the format that it is given.
    """

    def each(param: Param) -> Tree:
        parts = [_with_bias(part, storage, _stored(part, storage)) for part in apart(param, storage.formats)]
        return parts if len(parts) > 1 else parts[0]

    return tree.map_leaves(each, params)


def _with_bias(param: Param, storage: StoredFormats, weight: Tree) -> Tree:
    # Static scales have it in their integers.
    static = isinstance(weight, Mapping) and "quant_bias" in weight
    if not param.role or static or not (param.biased or storage.formats.has_bias(param.source.names)):
        return weight
    if param.role not in (NORM, "column"):
        raise CheckpointError(
            f"{param.source.names[0]}: has a bias; one is read of norms and of matrices whose contraction no layout splits"
        )
    bias = _bias(param, matrix=param.role != NORM)
    return {**weight, "bias": bias} if isinstance(weight, Mapping) else {"weight": param, "bias": bias}


def _bias(param: Param, *, matrix: bool) -> Param:
    """The bias of a norm [M], or of a matrix [out..., K], which goes through the matrix's join as one column of it."""
    source, names = param.source, tuple(sibling(name, "bias") for name in param.source.names)
    if not matrix:
        return Param(param.aval, replace(source, names=names), "zeros")
    column = Source(
        names,
        tuple(shape[:-1] for shape in source.shapes),
        lambda *biases: source.join(*(bias.unsqueeze(-1) for bias in biases)).squeeze(-1),
        lambda x: tuple(part.squeeze(-1) for part in source.split(x.unsqueeze(-1))),
        tuple(axes[:-1] for axes in param.source_axes),
    )
    return Param(replace(param.aval, shape=param.aval.shape[:-1], axes=param.aval.axes[:-1]), column, "zeros")


def _stored(param: Param, storage: StoredFormats) -> Tree:
    form = storage.formats.of(param.source.names)
    if param.role not in ROLES:
        if form != FLOAT:
            raise SpecError(f"{', '.join(param.source.names)}: the format is {form}; it is no matrix of a product, legal is {FLOAT}")
        return param
    lead, row = ROLES[param.role]
    matrix = DeclaredMatrix(param.aval.shape, param.aval.axes, lead, row, storage.parts(axis_name(param.aval.axes[-1])) if row else 1)
    if form == FLOAT:
        return {"weight": _turned(param, matrix)} if lead and storage.grouped else param
    if lead and form not in EXPERT_FORMATS:
        raise SpecError(f"{param.source.names[0]}: the format is {form}; legal for experts are {', '.join(EXPERT_FORMATS)}")
    if form in INT4:
        _check_padding(param, storage)
    declared = leaves.avals(matrix, form, storage.formats.group)
    source, together = (_integers if storage.formats.stored else _floats)(param, matrix, form, storage.formats.group)
    picked = {name: replace(source, join=Picked(together, index)) for index, name in enumerate(declared)}
    return {name: Param(aval, picked[name], "quantised") for name, aval in declared.items()}


def _check_padding(param: Param, storage: StoredFormats) -> None:
    """Refuses int4 of which ranks would share an element: eight channels are one, and in some checkpoints eight columns."""
    for name, shape, axes in zip(param.source.names, param.source.shapes, param.source_axes, strict=True):
        # A contraction is packed in some checkpoints, and nowhere else.
        for size, axis in list(zip(shape, axes, strict=True))[: None if storage.formats.stored else -1]:
            if isinstance(axis, Padded):
                share = axis.padded // dict(storage.padded)[axis.axis]
                if share % NIBBLES or (storage.formats.stored and size % NIBBLES):
                    raise SpecError(
                        f"{name}: its {axis.axis} is padded to {axis.padded} for the ranks that share it, and int4 are packed; legal are "
                        f"numbers of ranks that divide it, or sizes and shares, here {size} and {share}, that {NIBBLES} divides"
                    )
            elif isinstance(axis, Placed):
                _check_heads(name, axis, size // (axis.real * sum(axis.units)) * min(axis.units), NIBBLES, "are packed")


def _check_heads(name: str, axis: Placed, width: int, by: int, how: str) -> None:
    if width % by:
        raise SpecError(
            f"{name}: its {axis.real} heads are padded to {len(axis.places)} for the ranks that share them, and {by} int4 {how}; legal are "
            f"numbers of ranks that divide them, or heads of a multiple of {by} channels, here {width}"
        )


def _turned(param: Param, matrix: DeclaredMatrix) -> Param:
    """Float matrices with the contraction before the channels, as grouped products read them."""
    source, turned = param.source, matrix.weight(param.aval.dtype)
    return Param(
        turned,
        replace(
            source,
            join=lambda *tensors: matrix.turned(source.join(*tensors)).contiguous(),
            split=lambda x: source.split(x.movedim(matrix.lead, -1).contiguous()),
            axes=param.source_axes,
        ),
        param.init,
    )


Together = Callable[..., tuple[torch.Tensor, ...]]
Shape = tuple[int, ...]
SourceAxes = tuple[SourceAxis, ...]


def _floats(param: Param, matrix: DeclaredMatrix, form: str, group: int) -> tuple[Source, Together]:
    """Quantised when it is loaded, from the float tensors of a checkpoint."""
    join, contracted = param.source.join, axis_name(param.aval.axes[-1])
    # A scale needs the whole contraction, so that no rank may slice the sources along it.
    axes = tuple(tuple(None if axis_name(axis) == contracted else axis for axis in each) for each in param.source_axes)

    def together(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return leaves.from_floats(matrix, form, group, join(*tensors))

    return replace(param.source, join=join, split=_one_way, uncalibrated=form == W8A8, axes=axes), together


ROWS, VECTOR, GROUPS, INPUT = "a column", "a number a row", "a number a group", "one number"
_COMPANIONS: dict[str, tuple[tuple[str, str], ...]] = {
    W8A8_DYNAMIC: (("weight_scale", ROWS),),
    W8A8: (("deq_scale", VECTOR), ("quant_bias", VECTOR), ("input_scale", INPUT), ("input_offset", INPUT)),
    W4A8_DYNAMIC: (("weight_scale", ROWS), ("weight_scale_second", GROUPS)),
    W4A16: (("weight_scale", GROUPS),),
}
"""Format -> the tensors that a checkpoint has beside a matrix's integers, and their shapes: ModelSlim's, and of W4A16 those of
compressed-tensors."""


PACKED = "weight_packed"
"""Kind of the tensor in which compressed-tensors has eight int4 of a row in each int32."""
_DTYPES = {"deq_scale": ("F32", "I64"), "quant_bias": ("I32",)}


def _fewer(name: str, axis: SourceAxis, size: int, by: int) -> SourceAxis:
    """The axis of a dimension of which `by` neighbours are one element."""
    if isinstance(axis, Placed):
        _check_heads(name, axis, size // axis.real, by, "share an element or a scale")
    if not isinstance(axis, Padded):
        return axis
    if axis.padded % by or size % by:
        raise SpecError(
            f"{name}: its {axis.axis} of {size} is padded to {axis.padded} for the ranks that share it, and {by} of it share an element or "
            f"a scale; legal are sizes that {by} divides"
        )
    return Padded(axis.axis, axis.padded // by)


def _integers(param: Param, matrix: DeclaredMatrix, form: str, group: int) -> tuple[Source, Together]:
    """Read from a checkpoint that holds integers, under the names that ModelSlim gives them (26.1.0)."""
    if form not in _COMPANIONS:
        raise SpecError(f"{param.source.names[0]}: the format is {form}; legal in a checkpoint are {', '.join(_COMPANIONS)}")
    source, packed, columns = param.source, form == W4A8_DYNAMIC, form == W4A16
    kinds = [(kind, ROWS if columns and not group else shape) for kind, shape in _COMPANIONS[form]]
    companions = [(kind, shape) for kind, shape in kinds if shape != GROUPS or group]
    contracted = axis_name(param.aval.axes[-1])
    is_padded = any(isinstance(each[-1], Padded | Placed) for each in param.source_axes)
    # A static bias is of the whole contraction; the rank of its first part adds it.
    whole = form == W8A8 and matrix.row
    axes = [tuple(None if whole and axis_name(axis) == contracted else axis for axis in each) for each in param.source_axes]

    def integers(name: str, shape: Shape, each: SourceAxes) -> tuple[Any, ...]:
        if columns:
            return sibling(name, PACKED), (*shape[:-1], -(-shape[-1] // NIBBLES)), (*each[:-1], _fewer(name, each[-1], shape[-1], NIBBLES))
        return (name, _halved(shape, matrix.lead), _halved_axes(each, matrix.lead)) if packed else (name, shape, each)

    tensors = [integers(*each) for each in zip(source.names, source.shapes, axes, strict=True)]
    for kind, layout in companions:
        for name, shape, each in zip(source.names, source.shapes, axes, strict=True):
            tensors.append((sibling(name, kind), *_companion(name, shape, each, layout, group)))

    def together(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(source.names)
        weights, rest = given[:count], given[count:]
        if columns:
            weights = tuple(unpack_columns(weight, matrix.contraction) for weight in weights)
        joined = [source.join(*(unpack_rows(weight, matrix.lead) for weight in weights) if packed else weights)]
        for position, (_, layout) in enumerate(companions):
            part = rest[position * count : (position + 1) * count]
            if layout == INPUT:
                joined.extend(part)
            elif layout == GROUPS and is_padded:
                # Padding counts weights.
                joined.append(source.join(*(x.repeat_interleave(group, -1) for x in part))[..., ::group])
            else:
                joined.append(source.join(*(x.unsqueeze(-1) if layout == VECTOR else x for x in part)))
        return leaves.from_integers(matrix, form, group, *joined)

    names, shapes, sliced = (tuple(part[i] for part in tensors) for i in range(3))
    words = ("I32",) if columns else ("I8",)
    dtypes = [words] * len(source.names) + [_DTYPES.get(kind, NUMBERS) for kind, _ in companions for _ in source.names]
    made = Source(names, shapes, split=_one_way, axes=sliced, block_axis=source.block_axis, dtypes=tuple(dtypes))
    return replace(made, first_rows=source.first_rows), together


def _companion(name: str, shape: Shape, axes: SourceAxes, layout: str, group: int) -> tuple[Shape, SourceAxes]:
    if layout == INPUT:
        return (1,), (None,)
    if layout == VECTOR:
        return shape[:-1], axes[:-1]
    if layout == GROUPS:
        return (*shape[:-1], shape[-1] // group), (*axes[:-1], _fewer(name, axes[-1], shape[-1], group))
    return (*shape[:-1], 1), (*axes[:-1], None)


def _halved(shape: Shape, dim: int) -> Shape:
    """The shape of a matrix of which two neighbouring rows are one."""
    if shape[dim] % 2:
        raise CheckpointError(f"an int4 matrix has {shape[dim]} output channels; two share a byte, legal are even numbers")
    return (*shape[:dim], shape[dim] // 2, *shape[dim + 1 :])


def _halved_axes(axes: SourceAxes, dim: int) -> SourceAxes:
    axis = axes[dim]
    halved: SourceAxis = Parts(axis.axis, tuple(size // 2 for size in axis.sizes)) if isinstance(axis, Parts) else axis
    halved = Padded(axis.axis, axis.padded // 2) if isinstance(axis, Padded) else halved
    return (*axes[:dim], halved, *axes[dim + 1 :])


def _one_way(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise ModelError("a quantised parameter cannot be turned back into the floats of a checkpoint; save the model it was quantised from")
