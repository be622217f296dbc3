"""Regions: parts of a program that are written for one device's shards, with explicit collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import PartitionError
from ..types import WORLD, axis_group
from .layout import is_dtensor, num_shards, partition_context

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

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
        PartitionError: when an operand has another layout; `constrain` it first.
    """
    context = partition_context()
    if context is None:
        return fn(*(value for value, _ in operands))
    from .placement import assembled, local_of, placements

    shards = []
    for value, axes in operands:
        if is_dtensor(value):
            wanted = tuple(placements(axes, context.devices, context.rules))
            if tuple(value.placements) != wanted:
                raise PartitionError(
                    f"a region reads {tuple(value.shape)} by axes {axes}: {wanted}; it is {value.placements}; constrain it"
                )
            value = local_of(value)
        shards.append(value)
    out = fn(*shards)
    return assembled(out, context.devices, _result(result))


def _result(result: Axes | Sum) -> list[Placement]:
    from torch.distributed.tensor import Partial, Replicate

    from .placement import placements

    context = partition_context()
    assert context is not None
    if not isinstance(result, Sum):
        return placements(result, context.devices, context.rules)
    summed = context.rules.mesh_axes(result.logical)
    return [Partial() if name in summed else Replicate() for name in context.devices.mesh_dim_names or ()]


def axis_index(logical: str) -> torch.Tensor:
    """Which shard of a logical axis this device holds: [1] i32, a value of the graph. Only inside a region of several devices."""
    context = partition_context()
    assert context is not None
    names, index = [name for name, _ in context.mesh.axes], None
    for name in context.rules.mesh_axes(logical):
        if name in names:
            own = context.coords[names.index(name) : names.index(name) + 1]
            index = own if index is None else index * context.mesh.axis(name) + own
    return context.coords.new_zeros(1) if index is None else index


def group_of(logical: str) -> str:
    """Symbolic name of the group that the shards of a logical axis form: a mesh axis, or "world" for all devices."""
    context = partition_context()
    names = tuple(name for name in context.rules.mesh_axes(logical) if context.mesh.axis(name) > 1) if context else ()
    if context and len(names) > 1 and names != tuple(name for name, size in context.mesh.axes if size > 1):
        raise PartitionError(f"axis {logical!r} is split over {names}; legal is one axis of mesh {context.mesh}, or all in its order")
    return axis_group(names[0]) if len(names) == 1 and context and context.mesh.axis(names[0]) != context.mesh.size else WORLD


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
    received = ops.wait_tensor(ops.all_to_all_single(x.contiguous(), [rows] * count, [rows] * count, group_of(logical)))
    return received.view(count, rows, columns).transpose(0, 1).reshape(rows, count * columns)  # type: ignore[no-any-return]


def reduce_scatter(x: torch.Tensor, logical: str) -> torch.Tensor:
    """Sums over all devices, and keeps this device's shard of dimension 0."""
    count = num_shards(logical)
    if count == 1:
        return x
    ops = torch.ops._c10d_functional
    reduced: torch.Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", count, group_of(logical)))
    return reduced
