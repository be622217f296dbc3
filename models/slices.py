"""Which slices of a parameter's source tensors a rank reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..graphs.errors import PartitionError
from ..graphs.types import Aval, Mesh, Rules
from .params import Members, Padded, Param, Parts, Physical, Placed, Repeated, SourceAxis, axis_name

Region = tuple[tuple[slice, ...], ...]
"""What is read of a tensor: of each dimension the slices that are kept, one behind the other; without copies in order."""


@dataclass(frozen=True)
class Shard:
    """The share of all parameters that one rank holds."""

    mesh: Mesh
    rules: Rules
    rank: int

    def shape(self, aval: Aval) -> tuple[int, ...]:
        """Shape of the rank's slice of a value."""
        return self.rules.local_aval(aval, self.mesh).shape

    def run(self, size: int, axis: str | None) -> slice:
        """The rank's slice of a dimension."""
        (part,) = self.rules.local_slice(Aval((size,), torch.uint8, (axis,)), self.mesh, self.rank)
        return part

    def is_split(self, axis: str | None) -> bool:
        """Whether ranks hold different slices of a logical axis."""
        return self.rules.num_shards(axis, self.mesh) > 1


WHOLE = Shard(Mesh(), Rules(), 0)
"""One rank that holds everything."""


def sliced_axes(params: Sequence[Param], shard: Shard) -> frozenset[str]:
    """The axes along which source tensors are sliced before parameters are made from them; other split axes are sliced afterwards.

    Args:
        params: parameters made from the same source tensors.
    """
    declared = {axis_name(axis) for axes in params[0].source_axes for axis in axes}
    common = declared.intersection(*(param.aval.axes for param in params))
    return frozenset(axis for axis in common if axis is not None and shard.is_split(axis))


def source_region(shape: tuple[int, ...], axes: tuple[SourceAxis, ...], shard: Shard, sliced: frozenset[str]) -> Region:
    """What a rank reads of a source tensor.

    Args:
        sliced: the axes along which it is sliced; all others are read whole, physical experts in their places.

    Raises:
        PartitionError: a size does not divide by the number of ranks.
    """
    return tuple(
        _runs(size, axis, shard) if axis_name(axis) in sliced else _whole(size, axis) for size, axis in zip(shape, axes, strict=True)
    )


def remaining_slice(aval: Aval, shard: Shard, sliced: frozenset[str]) -> tuple[slice, ...]:
    """Where the rank's slice lies in a parameter whose source tensors were sliced along some axes."""
    axes = zip(aval.shape, aval.axes, strict=True)
    return tuple(slice(None) if axis in sliced else shard.run(size, axis) for size, axis in axes)


def source_bytes(params: Sequence[Param], shard: Shard, itemsize: int) -> int:
    """Bytes that a rank reads of a checkpoint to make its shards of all parameters; tensors of several parameters are read once.

    Args:
        itemsize: of an element on disk.
    """
    groups: dict[Hashable, list[Param]] = {}
    for param in params:
        groups.setdefault((param.source.names, param.source_axes, param.source.block_axis), []).append(param)
    total = 0
    for group in groups.values():
        sliced, source = sliced_axes(group, shard), group[0].source
        regions = [source_region(shape, axes, shard, sliced) for shape, axes in zip(source.shapes, group[0].source_axes, strict=True)]
        total += itemsize * sum(math.prod(region_shape(region)) for region in regions)
    return total


def region_shape(region: Region) -> tuple[int, ...]:
    """Shape of a tensor that holds what is read."""
    return tuple(sum(run.stop - run.start for run in runs) for runs in region)


def boxes(region: Region) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes of a region: one slice a dimension, in the source tensor and in the tensor that holds what is read."""
    pairs = []
    for runs in region:
        ends = itertools.accumulate(run.stop - run.start for run in runs)
        pairs.append([(run, slice(end - (run.stop - run.start), end)) for run, end in zip(runs, ends, strict=True)])
    for box in itertools.product(*pairs):
        yield tuple(source for source, _ in box), tuple(target for _, target in box)


def block_ranges(regions: Sequence[Region], itemsize: int, block_bytes: int) -> list[tuple[int, int]]:
    """Ranges of dimension 0 of what is read of several tensors that together have about `block_bytes`; at least one element each."""
    length = region_shape(regions[0])[0]
    row_bytes = itemsize * sum(math.prod(region_shape(region)[1:]) for region in regions)
    rows = max(1, block_bytes // max(1, row_bytes))
    return [(begin, min(begin + rows, length)) for begin in range(0, length, rows)]


def narrowed(region: Region, begin: int, end: int) -> Region:
    """A range of dimension 0 of what is read."""
    runs, at = [], 0
    for run in region[0]:
        low, high = max(begin - at, 0), min(end - at, run.stop - run.start)
        if low < high:
            runs.append(slice(run.start + low, run.start + high))
        at += run.stop - run.start
    return (tuple(runs), *region[1:])


def _whole(size: int, axis: SourceAxis) -> tuple[slice, ...]:
    return _runs_of(axis.logical) if isinstance(axis, Physical) else (slice(0, size),)


def _runs_of(elements: Sequence[int]) -> tuple[slice, ...]:
    """Single elements as slices, those that follow each other as one."""
    runs: list[slice] = []
    for element in elements:
        if runs and runs[-1].stop == element:
            runs[-1] = slice(runs[-1].start, element + 1)
        else:
            runs.append(slice(element, element + 1))
    return tuple(runs)


def _runs(size: int, axis: SourceAxis, shard: Shard) -> tuple[slice, ...]:
    if isinstance(axis, Physical):
        return _runs_of(axis.logical[shard.run(len(axis.logical), axis.axis)])
    if isinstance(axis, Repeated):
        return (_shared_run(size, axis, shard),)
    if isinstance(axis, Placed):
        return _placed_runs(size, axis, shard)
    if isinstance(axis, Members):
        return (shard.run(size, axis.axis),)
    if isinstance(axis, Padded):
        run = shard.run(axis.padded, axis.axis)
        return (slice(min(run.start, size), min(run.stop, size)),)
    if not isinstance(axis, Parts):
        return (shard.run(size, axis),)
    runs, begin = [], 0
    for part in axis.sizes:
        run = shard.run(part, axis.axis)
        runs.append(slice(begin + run.start, begin + run.stop))
        begin += part
    return tuple(runs)


def _placed_runs(size: int, axis: Placed, shard: Shard) -> tuple[slice, ...]:
    whole = axis.real * sum(axis.units)
    run = shard.run(len(axis.places) * axis.copies, axis.axis)
    own = [head for head in axis.places[run.start // axis.copies : -(-run.stop // axis.copies)] if head >= 0]
    low, high = (own[0], own[-1] + 1) if own else (0, 0)
    runs, begin = [], 0
    for unit in axis.units:
        # Of packed matrices a head takes fewer elements than it has channels.
        head = size * unit // whole
        if size * unit % whole:
            raise PartitionError(
                f"{size} elements of {axis.real} {axis.axis} cannot be told apart; legal are elements that no two heads share"
            )
        runs.append(slice(begin + low * head, begin + high * head))
        begin += axis.real * head
    return tuple(runs)


def _shared_run(size: int, axis: Repeated, shard: Shard) -> slice:
    run, width = shard.run(axis.elements * axis.copies, axis.axis), size // axis.elements
    copies = run.stop - run.start
    if copies % axis.copies and axis.copies % copies:
        raise PartitionError(
            f"a rank has {copies} of {axis.elements} {axis.axis} times {axis.copies} copies; legal is a multiple or a divisor of the copies"
        )
    return slice(run.start // axis.copies * width, -(-run.stop // axis.copies) * width)
