"""Placements of DTensors: what logical axes become while a program is being partitioned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..errors import PartitionError
from ..types import Mesh, Rules, axis_group


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


def laid_out(x: DTensor, axes: tuple[str | None, ...], rules: Rules, mesh: Mesh, coords: torch.Tensor) -> DTensor:
    """The value, split by its logical axes on a mesh, of which this device has the coordinates.

    Raises:
        PartitionError: when a size does not divide.
    """
    wanted = placements(axes, x.device_mesh, rules)
    for dim, logical in enumerate(axes):
        size = math.prod(size for placement, size in zip(wanted, x.device_mesh.shape, strict=True) if placement == Shard(dim))
        if x.shape[dim] % size:
            raise PartitionError(f"constrain: axis {logical!r} of size {x.shape[dim]} does not divide by {size} (mesh {mesh})")
    return _moved(x, wanted, mesh, coords)


def _moved(x: DTensor, wanted: Sequence[Placement], mesh: Mesh, coords: torch.Tensor) -> DTensor:
    """The value in another layout: communication along one mesh axis after the other, then each device's share of what is whole.

    A dimension that several mesh axes split, before or after, is gathered first, the innermost axis first: DTensor would take shares of
    it by the rank that traces.
    """
    before, axes = x.placements, range(len(wanted))
    splits = [{placement.dim for placement in (before[i], wanted[i]) if isinstance(placement, Shard)} for i in axes]
    crowded = {dim for i in axes for dim in splits[i] if list(before) != list(wanted) and sum(dim in each for each in splits) > 1}
    for i in reversed(axes):
        x = _with(x, i, Replicate()) if _is_split(before[i], crowded) else x
    shares = [i for i in axes if isinstance(x.placements[i], Replicate) or _is_split(wanted[i], crowded)]
    shares = [i for i in shares if isinstance(wanted[i], Shard)]
    for i in axes:
        x = _with(x, i, Replicate() if i in shares else wanted[i])
    for i in shares:
        x = _own_share(x, i, wanted[i], mesh, coords)
    return x


def _is_split(placement: Placement, dims: set[int]) -> bool:
    return isinstance(placement, Shard) and placement.dim in dims


def _with(x: DTensor, axis: int, placement: Placement) -> DTensor:
    """The value with another placement on one axis of the mesh."""
    before, layout = x.placements[axis], [*x.placements[:axis], placement, *x.placements[axis + 1 :]]
    if before == placement:
        return x
    if isinstance(before, Shard) and isinstance(placement, Shard):
        return _exchanged(x, axis, before.dim, layout)
    return x.redistribute(placements=layout)


def _exchanged(x: DTensor, axis: int, whole: int, layout: Sequence[Placement]) -> DTensor:
    """A value that is split along another dimension instead, `whole` being that which becomes whole.

    By an all-to-all; for CPUs DTensor would gather the value, and take the shard of the device that traces.
    """
    count, split = x.device_mesh.size(axis), layout[axis]
    assert isinstance(split, Shard)
    group = axis_group((x.device_mesh.mesh_dim_names or ())[axis])
    parts = local_of(x).unflatten(split.dim, (count, -1)).movedim(split.dim, 0).contiguous()
    ops = torch.ops._c10d_functional
    received = ops.wait_tensor(ops.all_to_all_single(parts, [1] * count, [1] * count, group))
    return assembled(received.movedim(0, whole).flatten(whole, whole + 1), x.device_mesh, layout)


def _own_share(x: DTensor, axis: int, shard: Placement, mesh: Mesh, coords: torch.Tensor) -> DTensor:
    """A device's shard of a value that is whole on a mesh axis, by its coordinates; DTensor would take that of the device that traces."""
    assert isinstance(shard, Shard)
    names = [name for name, _ in mesh.axes]
    place = names.index((x.device_mesh.mesh_dim_names or ())[axis]) - len(names)
    index = coords[place : place + 1 or None]
    parts = local_of(x).unflatten(shard.dim, (x.device_mesh.size(axis), -1))
    layout = [*x.placements[:axis], shard, *x.placements[axis + 1 :]]
    return assembled(parts.index_select(shard.dim, index).squeeze(shard.dim), x.device_mesh, layout)


def logical_axes(x: DTensor, rules: Rules) -> tuple[str | None, ...] | None:
    """Logical axes by which the rules split a value as it is split; None where they split none so."""
    if not all(type(placement) in (Shard, Replicate) for placement in x.placements):
        return None
    logical = {(): None, **{names: name for name, names in reversed(rules.table)}}
    placed = list(zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True))
    split = [tuple(name for name, placement in placed if placement == Shard(dim)) for dim in range(x.dim())]
    return tuple(logical[names] for names in split) if all(names in logical for names in split) else None


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


__all__ = ["assembled", "laid_out", "local_of", "logical_axes", "placements"]
