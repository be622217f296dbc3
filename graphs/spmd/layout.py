"""Layouts of values by their logical axes, while a program is being partitioned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ..errors import PartitionError
from ..types import Mesh, Rules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class PartitionContext:
    """What a program is being partitioned for.

    Attributes:
        rules: the layout.
        mesh: all devices (`Mesh.complete`).
        devices: the mesh of DTensors: of a step `tp` alone, since its program is written for one group of the manual axis.
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


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. While their module, which takes seconds to import, is not loaded, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


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
    if context is not None and is_dtensor(x):
        from .placement import laid_out

        return laid_out(x, axes, context.rules, context.mesh, context.coords)
    return x


__all__ = ["PartitionContext", "constrain", "is_dtensor", "num_shards", "partition_context", "partitioning"]
