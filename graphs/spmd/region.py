"""Turns a function of one device's shards into a part of a program: explicit code with explicit collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ..errors import PartitionError
from ..types import WORLD
from .layout import assembled, local_of, num_shards, place, placements

Axes = tuple[str | None, ...]


class Sum:
    """Layout of a region's result: every shard of the logical axis holds an addend of the value."""

    def __init__(self, logical: str) -> None:
        self.logical = logical


def shard_map(fn: Callable[..., torch.Tensor], operands: Sequence[tuple[torch.Tensor, Axes]], result: Axes | Sum) -> torch.Tensor:
    """`fn` of this device's shards of the operands; outside partitioning, of the operands.

    Args:
        fn: takes and returns tensors of one device; it may use `axis_index`, `all_gather` and `reduce_scatter`.
        operands: values, each with the logical axes it must be laid out by.
        result: logical axes of the result, or `Sum`.

    Raises:
        PartitionError: when an operand is laid out in another way; `constrain` it first.
    """
    at = place()
    if at is None:
        return fn(*(value for value, _ in operands))
    shards = []
    for value, axes in operands:
        if isinstance(value, DTensor):
            wanted = tuple(placements(axes, at.devices, at.rules))
            if tuple(value.placements) != wanted:
                raise PartitionError(
                    f"a region reads {tuple(value.shape)} by axes {axes}: {wanted}; it is {value.placements}; constrain it"
                )
            value = local_of(value)
        shards.append(value)
    out = fn(*shards)
    return assembled(out, at.devices, _result(result))


def _result(result: Axes | Sum) -> list[Placement]:
    at = place()
    assert at is not None
    if not isinstance(result, Sum):
        return placements(result, at.devices, at.rules)
    summed = at.rules.mesh_axes(result.logical)
    return [Partial() if name in summed else Replicate() for name in at.devices.mesh_dim_names or ()]


def axis_index(logical: str) -> torch.Tensor:
    """Which shard of a logical axis this device holds: [1] i32, a value of the graph. Only inside a region of several devices."""
    at = place()
    assert at is not None
    names, index = [name for name, _ in at.mesh.axes], None
    for name in at.rules.mesh_axes(logical):
        if name in names:
            here = at.coords[names.index(name) : names.index(name) + 1]
            index = here if index is None else index * at.mesh.axis(name) + here
    return at.coords.new_zeros(1) if index is None else index


def group_of(logical: str) -> str:
    """Symbolic name of the group that the shards of a logical axis form: a mesh axis, or "world" for all devices."""
    at = place()
    names = tuple(name for name in at.rules.mesh_axes(logical) if at.mesh.axis(name) > 1) if at else ()
    if at and len(names) > 1 and names != tuple(name for name, size in at.mesh.axes if size > 1):
        raise PartitionError(f"axis {logical!r} is split over {names}; legal is one axis of mesh {at.mesh}, or all in its order")
    return names[0] if len(names) == 1 and at and at.mesh.axis(names[0]) != at.mesh.size else WORLD


def all_gather(x: torch.Tensor, logical: str) -> torch.Tensor:
    """Concatenates the shards of all devices along dimension 0, in the order of the axis."""
    count = num_shards(logical)
    if count == 1:
        return x
    ops = torch.ops._c10d_functional
    gathered: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), count, group_of(logical)))
    return gathered


def all_to_all(x: torch.Tensor, logical: str) -> torch.Tensor:
    """Rows split by device for columns split by device: [R, C / n] -> [R / n, C], n the shards of the axis."""
    count = num_shards(logical)
    if count == 1:
        return x
    rows, columns = x.shape[0] // count, x.shape[1]
    ops = torch.ops._c10d_functional
    moved = ops.wait_tensor(ops.all_to_all_single(x.contiguous(), [rows] * count, [rows] * count, group_of(logical)))
    return moved.view(count, rows, columns).transpose(0, 1).reshape(rows, count * columns)  # type: ignore[no-any-return]


def reduce_scatter(x: torch.Tensor, logical: str) -> torch.Tensor:
    """Sums over all devices, and keeps this device's shard of dimension 0."""
    count = num_shards(logical)
    if count == 1:
        return x
    ops = torch.ops._c10d_functional
    kept: torch.Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", count, group_of(logical)))
    return kept
