"""Turns logical axis names on a value into the sharding it has while a program is being partitioned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .errors import PartitionError
from .types import Rules

_RULES: ContextVar[Rules | None] = ContextVar("rules", default=None)


@contextmanager
def partitioning(rules: Rules) -> Iterator[None]:
    """While open, `constrain` lays values out by `rules`; only the partitioner opens it."""
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


def placements(axes: tuple[str | None, ...], mesh: DeviceMesh, rules: Rules) -> list[Placement]:
    """One placement per mesh axis: `Shard(dim)` of the dimension whose logical axis maps to it, else `Replicate()`."""
    names = mesh.mesh_dim_names or ()
    found: list[Placement] = []
    for name in names:
        dims = [dim for dim, logical in enumerate(axes) if name in rules.mesh_axes(logical)]
        if len(dims) > 1:
            raise PartitionError(f"axes {[axes[d] for d in dims]} of one value both map to mesh axis {name!r}; one may")
        found.append(Shard(dims[0]) if dims else Replicate())
    return found


def constrain(x: torch.Tensor, *axes: str | None) -> torch.Tensor:
    """The same value, laid out by its logical axes; outside partitioning it is the value itself.

    A model writes this after every product whose contracted dimension may be sharded: there, and only there, partial sums
    are reduced.

    Args:
        x: any shape.
        axes: one logical axis name, or None for whole, per dimension.

    Raises:
        PartitionError: when the number of names differs from the number of dimensions.
    """
    if len(axes) != x.dim():
        raise PartitionError(f"constrain: {len(axes)} axis names {axes} for a value of shape {tuple(x.shape)}")
    rules = _RULES.get()
    if rules is None or not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=placements(axes, x.device_mesh, rules))
