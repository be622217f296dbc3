"""Turns logical axis names on a value into the sharding it has while a program is being partitioned."""

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
from ..types import MANUAL_AXIS, Mesh, Rules


@dataclass(frozen=True)
class Place:
    """Where a program runs while it is being partitioned.

    Attributes:
        devices: the mesh of DTensors: `tp` alone, since a program is written for one group of the manual axis.
        coords: [axes of mesh] i32, the device's position on each axis: a value of the graph, one graph serves all devices.
    """

    rules: Rules
    mesh: Mesh
    devices: DeviceMesh
    coords: torch.Tensor


_PLACE: ContextVar[Place | None] = ContextVar("place", default=None)


def place() -> Place | None:
    """Where the program runs; None outside partitioning, where there is one device."""
    return _PLACE.get()


@contextmanager
def partitioning(at: Place) -> Iterator[None]:
    """While open, `constrain` and regions lay values out by `at`; only the partitioner opens it."""
    token = _PLACE.set(at)
    try:
        yield
    finally:
        _PLACE.reset(token)


def num_shards(logical: str) -> int:
    """Number of shards of a logical axis: 1 outside partitioning."""
    at = _PLACE.get()
    return at.rules.num_shards(logical, at.mesh) if at else 1


def placements(axes: tuple[str | None, ...], mesh: DeviceMesh, rules: Rules) -> list[Placement]:
    """One placement per mesh axis: `Shard(dim)` of the dimension whose logical axis maps to it, else `Replicate()`."""
    found: list[Placement] = []
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        dims = [dim for dim, logical in enumerate(axes) if name in rules.mesh_axes(logical)]
        if len(dims) > 1:
            raise PartitionError(f"axes {[axes[d] for d in dims]} of one value both map to mesh axis {name!r}; one may")
        # Of an axis of one device a shard is the whole; DTensor would call them two layouts.
        found.append(Shard(dims[0]) if dims and size > 1 else Replicate())
    return found


def constrain(x: torch.Tensor, *axes: str | None) -> torch.Tensor:
    """The same value, laid out by its logical axes; outside partitioning it is the value itself.

    A model writes this after every product whose contracted dimension may be sharded: there, and only there, partial sums
    are reduced.

    Args:
        x: any shape.
        axes: one logical axis name, or None for whole, per dimension.

    Raises:
        PartitionError: when the number of names differs from the number of dimensions, or a size does not divide.
    """
    if len(axes) != x.dim():
        raise PartitionError(f"constrain: {len(axes)} axis names {axes} for a value of shape {tuple(x.shape)}")
    at = _PLACE.get()
    if at is None or not isinstance(x, DTensor):
        return x
    wanted = placements(axes, x.device_mesh, at.rules)
    for placement, size in zip(wanted, x.device_mesh.shape, strict=True):
        if isinstance(placement, Shard) and x.shape[placement.dim] % size:
            raise PartitionError(
                f"constrain: axis {axes[placement.dim]!r} of size {x.shape[placement.dim]} does not divide by {size} (mesh {at.mesh})"
            )
    (before,), (after,) = x.placements, wanted
    if isinstance(before, Replicate) and isinstance(after, Shard):
        return _own_share(x, after, at)
    return x.redistribute(placements=wanted)


def _own_share(x: DTensor, shard: Shard, at: Place) -> torch.Tensor:
    """A device's share of a whole value. DTensor would slice at the position of the device that traces."""
    here = at.coords[-1:]
    parts = local_of(x).unflatten(shard.dim, (x.device_mesh.size(), -1))
    return assembled(parts.index_select(shard.dim, here).squeeze(shard.dim), x.device_mesh, [shard])


def local_of(x: torch.Tensor) -> torch.Tensor:
    """This device's part of a value. Unlike `to_local` it leaves no view in the graph that is being traced."""
    return x._local_tensor if isinstance(x, DTensor) else x


def assembled(local: torch.Tensor, devices: DeviceMesh, layout: Sequence[Placement]) -> DTensor:
    """The value of which every device holds a part like `local`. Unlike `from_local` it leaves no view in the graph."""
    shape = list(local.shape)
    for placement, size in zip(layout, devices.shape, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    spec = DTensorSpec(devices, tuple(layout), TensorMeta(torch.Size(shape), strides, local.dtype))
    return DTensor(local, spec, requires_grad=False)


__all__ = ["MANUAL_AXIS", "Place", "assembled", "constrain", "local_of", "num_shards", "partitioning", "place", "placements"]
