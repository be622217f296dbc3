"""Layouts of values by their logical axes, while a program is being partitioned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..errors import PartitionError
from ..types import Mesh, Rules


@dataclass(frozen=True)
class PartitionContext:
    """What a program is being partitioned for.

    Attributes:
        rules: the layout.
        mesh: all devices.
        devices: the mesh of DTensors: `tp` alone, since a program is written for one group of the manual axis.
        coords: [axes of mesh] i32, the device's index on each axis: a value of the graph, since one graph serves all devices.
    """

    rules: Rules
    mesh: Mesh
    devices: DeviceMesh
    coords: torch.Tensor


_CONTEXT: ContextVar[PartitionContext | None] = ContextVar("partition_context", default=None)


def partition_context() -> PartitionContext | None:
    """What the program is being partitioned for; None outside partitioning, where there is one device."""
    return _CONTEXT.get()


@contextmanager
def partitioning(context: PartitionContext) -> Iterator[None]:
    """While open, `constrain` and regions lay values out by `context`; only the partitioner opens it."""
    token = _CONTEXT.set(context)
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def num_shards(logical: str) -> int:
    """Number of shards of a logical axis: 1 outside partitioning."""
    context = _CONTEXT.get()
    return context.rules.num_shards(logical, context.mesh) if context else 1


def placements(axes: tuple[str | None, ...], mesh: DeviceMesh, rules: Rules) -> list[Placement]:
    """One placement per mesh axis: `Shard(dim)` of the dimension whose logical axis maps to it, else `Replicate()`."""
    layout: list[Placement] = []
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        dims = [dim for dim, logical in enumerate(axes) if name in rules.mesh_axes(logical)]
        if len(dims) > 1:
            raise PartitionError(f"axes {[axes[d] for d in dims]} of one value both map to mesh axis {name!r}; at most one may")
        # On an axis of one device a shard is the whole value; DTensor would treat the two as different layouts.
        layout.append(Shard(dims[0]) if dims and size > 1 else Replicate())
    return layout


def constrain(x: torch.Tensor, *axes: str | None) -> torch.Tensor:
    """The same value, laid out by its logical axes; outside partitioning it is the value itself.

    A model calls this after every product whose contracted dimension may be sharded: partial sums are reduced there and nowhere
    else.

    Args:
        x: any shape.
        axes: one logical axis name, or None for whole, per dimension.

    Raises:
        PartitionError: when the number of names differs from the number of dimensions, or a size does not divide.
    """
    if len(axes) != x.dim():
        raise PartitionError(f"constrain: {len(axes)} axis names {axes} for a value of shape {tuple(x.shape)}")
    context = _CONTEXT.get()
    if context is None or not isinstance(x, DTensor):
        return x
    wanted = placements(axes, x.device_mesh, context.rules)
    for placement, size in zip(wanted, x.device_mesh.shape, strict=True):
        if isinstance(placement, Shard) and x.shape[placement.dim] % size:
            raise PartitionError(
                f"constrain: axis {axes[placement.dim]!r} of size {x.shape[placement.dim]} does not divide by {size} (mesh {context.mesh})"
            )
    (before,), (after,) = x.placements, wanted
    if isinstance(before, Replicate) and isinstance(after, Shard):
        return _own_share(x, after, context)
    return x.redistribute(placements=wanted)


def _own_share(x: DTensor, shard: Shard, context: PartitionContext) -> torch.Tensor:
    """A device's shard of a whole value, by its coordinates; DTensor would take the shard of the device that traces."""
    index = context.coords[-1:]
    parts = local_of(x).unflatten(shard.dim, (x.device_mesh.size(), -1))
    return assembled(parts.index_select(shard.dim, index).squeeze(shard.dim), x.device_mesh, [shard])


def local_of(x: torch.Tensor) -> torch.Tensor:
    """This device's part of a value. Unlike `to_local` it adds no view to the graph that is being traced."""
    return x._local_tensor if isinstance(x, DTensor) else x


def assembled(local: torch.Tensor, devices: DeviceMesh, layout: Sequence[Placement]) -> DTensor:
    """The value of which every device holds a part like `local`. Unlike `from_local` it adds no view to the graph."""
    shape = list(local.shape)
    for placement, size in zip(layout, devices.shape, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    spec = DTensorSpec(devices, tuple(layout), TensorMeta(torch.Size(shape), strides, local.dtype))
    return DTensor(local, spec, requires_grad=False)


__all__ = ["PartitionContext", "assembled", "constrain", "local_of", "num_shards", "partition_context", "partitioning", "placements"]
