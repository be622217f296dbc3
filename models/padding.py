"""Vocabularies and feed-forwards that ranks cannot share evenly: their dimensions are padded with zeros until they can.

A padded channel of a feed-forward adds zero to the product that contracts it. A padded row of an embedding is never looked up; a padded
logit is cut off or hidden before anything reads it (sampling.py). Heads: head_padding.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from ..graphs import tree
from ..graphs.errors import PartitionError
from ..graphs.types import Tree
from .params import Padded, Param, Source, SourceAxis

AXES = ("vocab", "ffn")
"""Logical axes that are padded."""


class PaddedAxes(Protocol):
    """How many ranks share the axes that are padded; `models.variant.Variant` is one."""

    @property
    def padded(self) -> tuple[tuple[str, int], ...]: ...


def padded_size(size: int, ranks: int) -> int:
    """A size, rounded up to a multiple of the ranks that share it.

    Raises:
        PartitionError: a rank would have nothing but padding.
    """
    share = -(-size // ranks)
    if share * (ranks - 1) >= size:
        legal = next(count for count in range(ranks - 1, 0, -1) if -(-size // count) * (count - 1) < size)
        raise PartitionError(f"{ranks} ranks cannot share {size} elements: some would have padding alone; legal are up to {legal}")
    return share * ranks


def padded(params: Tree, storage: PaddedAxes) -> Tree:
    """A tree of Param with the dimensions padded that ranks do not share evenly."""
    ranks = dict(storage.padded)
    return tree.map_leaves(lambda param: _padded(param, ranks), params) if ranks else params


def paddings(params: Tree, storage: PaddedAxes) -> Iterator[tuple[str, int, int, int]]:
    """(axis, size, padded size, ranks) of all that `padded` changes, each once."""
    ranks, seen = dict(storage.padded), set()
    for _, param in tree.flatten(params):
        for size, axis in zip(param.aval.shape, param.aval.axes, strict=True):
            if axis in ranks and size % ranks[axis] and (axis, size) not in seen:
                seen.add((axis, size))
                yield axis, size, padded_size(size, ranks[axis]), ranks[axis]


def _padded(param: Param, ranks: dict[str, int]) -> Param:
    aval = param.aval
    sizes = {axis: size for size, axis in zip(aval.shape, aval.axes, strict=True) if axis in ranks and size % ranks[axis]}
    if not sizes:
        return param
    to = {axis: padded_size(size, ranks[axis]) for axis, size in sizes.items()}
    shape = tuple(to.get(axis or "", size) for size, axis in zip(aval.shape, aval.axes, strict=True))
    return replace(param, aval=replace(aval, shape=shape), source=_source(param, to, ranks))


def _source(param: Param, to: dict[str, int], ranks: dict[str, int]) -> Source:
    """Pads the tensors of a checkpoint before they are joined, and cuts them after they are split."""
    source = param.source
    axes: tuple[tuple[SourceAxis, ...], ...] = tuple(
        tuple(Padded(axis, to[axis]) if isinstance(axis, str) and axis in to else axis for axis in each) for each in param.source_axes
    )

    def join(*tensors: torch.Tensor) -> torch.Tensor:
        return source.join(*(_filled(tensor, each, ranks) for tensor, each in zip(tensors, axes, strict=True)))

    def split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = source.split(tensor)
        return tuple(part[tuple(slice(0, size) for size in shape)] for part, shape in zip(parts, source.shapes, strict=True))

    return replace(source, join=join, split=split, axes=axes)


def _filled(tensor: torch.Tensor, axes: tuple[SourceAxis, ...], ranks: dict[str, int]) -> torch.Tensor:
    """A whole tensor, or what a rank read of it, with zeros up to a whole number of ranks' shares.

    A dimension of one element is that of a scale that has none along the matrix's dimension.
    """
    # Companions of quantised matrices go through the join as matrices of one column.
    for dim, axis in enumerate(axes[: tensor.dim()]):
        if isinstance(axis, Padded) and (size := tensor.shape[dim]) > 1:
            share = axis.padded // ranks[axis.axis]
            if missing := -size % share:
                fill = tensor.new_zeros(*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
                tensor = torch.cat([tensor, fill], dim)
    return tensor
