"""The records that all stages share: Aval, Rules, Signature, Program, and those of sizes.py.

Shape letters, the same in every comment, docstring and einsum of this project:

    B requests in a step    Q new tokens per request    T tokens in a step (B*Q)    K cached tokens
    H query heads           G key/value heads           D head width                M model width
    F ffn width             E experts                   X experts per token         V vocabulary
    P tokens per page       N pages per request         S state slots
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import PartitionError, SpecError
from .sizes import (
    AXIS,
    COORDS,
    DISPATCH,
    FUSED_EXPERTS,
    MANUAL_AXIS,
    MESH_AXES,
    PICTURE_ROWS,
    WORD_BITS,
    WORLD,
    Bucket,
    Limits,
    Mesh,
    axis_group,
)

__all__ = [
    "AXIS", "COORDS", "DISPATCH", "DTYPES", "DTYPE_NAMES", "FUSED_EXPERTS", "MANUAL_AXIS", "MESH_AXES",
    "PICTURE_ROWS", "WORD_BITS", "WORLD", "Aval", "Bucket", "Function", "Leaf", "Limits", "Mesh",
    "Program", "Rules", "Signature", "Tree", "axis_group", "leaf_name",
]  # fmt: skip

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.uint64: "u64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Aval:
    """An abstract value: shape and dtype of a tensor that does not exist yet.

    Attributes:
        shape: sizes, global (unsharded) unless a stage says otherwise.
        dtype: element type.
        axes: one logical axis name per dimension, None where the dimension is never sharded.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", (None,) * len(self.shape))
        if len(self.axes) != len(self.shape):
            raise SpecError(f"{len(self.axes)} axis names {self.axes} for {len(self.shape)} dimensions {self.shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{DTYPE_NAMES.get(self.dtype, self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Rules:
    """A layout: which mesh axes a logical axis is split over. A new layout is a new mapping, never a new model.

    A dimension whose logical axis maps to mesh axes is split into as many equal parts as those axes have devices together; a rank
    holds the part numbered by its coordinates on them, row-major in the order the rules list them. All else is held whole.
    """

    table: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @staticmethod
    def of(table: Mapping[str, str | tuple[str, ...]]) -> Rules:
        return Rules(tuple(sorted((k, (v,) if isinstance(v, str) else tuple(v)) for k, v in table.items())))

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        return dict(self.table).get(logical, ()) if logical else ()

    def num_shards(self, logical: str | None, mesh: Mesh) -> int:
        """Number of shards that a logical axis has on a mesh."""
        return math.prod(mesh.axis(name) for name in self.mesh_axes(logical))

    def check(self, aval: Aval, mesh: Mesh, what: str) -> None:
        """Refuses a value whose sharded sizes do not divide, or whose axes collide.

        Raises:
            PartitionError: naming the value, the axis, the mesh and the sizes.
        """
        logical_of: dict[str, str] = {}
        for size, logical in zip(aval.shape, aval.axes, strict=True):
            names = self.mesh_axes(logical)
            shards = self.num_shards(logical, mesh)
            if size % shards:
                raise PartitionError(f"{what}: axis {logical!r} of size {size} does not divide by {shards} ({names} of mesh {mesh})")
            for name in names:
                if name in logical_of:
                    raise PartitionError(f"{what}: axes {logical_of[name]!r} and {logical!r} both map to mesh axis {name!r}")
                logical_of[name] = str(logical)

    def local_aval(self, aval: Aval, mesh: Mesh) -> Aval:
        """What one rank holds of a global value; the same shape on all ranks.

        Raises:
            PartitionError: when a size does not divide, or two dimensions are split over one mesh axis.
        """
        self.check(aval, mesh, str(aval))
        shape = tuple(size // self.num_shards(axis, mesh) for size, axis in zip(aval.shape, aval.axes, strict=True))
        return Aval(shape, aval.dtype, aval.axes)

    def local_slice(self, aval: Aval, mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """Where a rank's part of a global value lies in it.

        Raises:
            PartitionError: as `local_aval`.
            SpecError: when the mesh has no such rank.
        """
        coordinates = mesh.coordinates(rank)
        slices = []
        for size, logical in zip(self.local_aval(aval, mesh).shape, aval.axes, strict=True):
            index = 0
            for name in self.mesh_axes(logical):
                index = index * mesh.axis(name) + coordinates.get(name, 0)
            slices.append(slice(index * size, (index + 1) * size))
        return tuple(slices)


@dataclass(frozen=True)
class Function:
    """What a program is that is no step of a language model: a function, traced for one set of shapes."""

    name: str
    kind: str = "function"


def leaf_name(part: str, path: str) -> str:
    """Name of a leaf: `leaf_name("params", "layers.0.w")` is `params.layers.0.w`.

    Args:
        part: params, state, inputs or outputs.
        path: dotted path in that tree.
    """
    return f"{part}.{path}"


@dataclass(frozen=True)
class Leaf:
    """One flat operand or result of a graph: its name, as `leaf_name` joins it, and its abstract value."""

    name: str
    aval: Aval

    @property
    def part(self) -> str:
        """The tree it belongs to: params, state, inputs or outputs."""
        return self.name.partition(".")[0]

    @property
    def path(self) -> str:
        """Its dotted path in that tree."""
        return self.name.partition(".")[2]


@dataclass(frozen=True)
class Signature:
    """Flat calling convention of a graph: `(*params, *state, *inputs) -> (*outputs, *state)`.

    State leaves are donated: results `state[i]` replace operands `state[i]`.
    """

    params: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]

    @property
    def operands(self) -> tuple[Leaf, ...]:
        return (*self.params, *self.state, *self.inputs)

    @property
    def results(self) -> tuple[Leaf, ...]:
        return (*self.outputs, *self.state)


Tree = Any
"""Nested dicts, lists and tuples of leaves (torch.utils._pytree)."""


@dataclass(frozen=True)
class Program:
    """A pure function and the abstract trees it is called with. No tensor exists yet.

    `forward(params, state, inputs) -> (outputs, new_state)`; `new_state` has the structure of `state`.
    """

    name: str
    bucket: Bucket | Function
    forward: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]] = field(compare=False)
    params: Tree
    state: Tree
    inputs: Tree
