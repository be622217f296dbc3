"""The padded input arrays of a step, from its rows: by the record of its kind (graphs/steps/)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...graphs.errors import SpecError
from ...graphs.steps.encode import CHANNELS
from ...graphs.steps.inputs import OPTIONAL_ROWS
from ...graphs.steps.kind import SegmentSizes
from ...graphs.steps.table import StepInputs, kind_of
from ...graphs.types import Bucket, Limits
from .. import adjustments
from ..constraint import Bitmask
from .rows import ROWS, PrefillRow, Row

Arrays = dict[str, npt.NDArray[Any]]
Tables = Mapping[str, Sequence[tuple[int, Any]]]

DTYPES = {torch.int32: np.int32, torch.float32: np.float32, torch.uint8: np.uint8}


class _Layout(NamedTuple):
    """How the inputs of a bucket are made.

    Attributes:
        arrays: name, shape, dtype and padding value of each.
        columns: names of those with a number of each row, the column it goes to where there are several, and where it is in the row.
        groups: names of those that a row has as items of one attribute, and this.
        spread: names of those with a sequence of each row, and where that is.
        tables: where a row has what is more than numbers, and what stores that.
        sizes: of letters.
    """

    arrays: tuple[tuple[str, tuple[int, ...], type, float], ...]
    columns: tuple[tuple[str, int | None, Callable[[Any], float]], ...]
    groups: tuple[tuple[tuple[str, ...], Callable[[Any], Sequence[float]]], ...]
    spread: tuple[tuple[str, Callable[[Any], Sequence[float]]], ...]
    tables: tuple[tuple[Callable[[Any], Any], Callable[[Arrays, Sequence[tuple[int, Any]]], None]], ...]
    sizes: Mapping[str, int]


def pack(bucket: Bucket, rows: Sequence[Row], limits: Limits, *, max_logprobs: int = 0, segments: SegmentSizes | None = None) -> Arrays:
    """The inputs of one step by name, as the record of its kind has them.

    Every array is new, so that nothing of an earlier step can be in the padding.

    Args:
        rows: PrefillRow for a prefill bucket, DecodeRow for a decode bucket, SegmentRow for an encode bucket.
        max_logprobs: for how many of the most likely tokens the graphs return log probabilities; with 0 they return none.
        segments: what encode buckets take.

    Raises:
        SpecError: when the rows do not fit the bucket or the limits.
    """
    kind, layout = kind_of(bucket), _layout(StepInputs(bucket, limits, max_logprobs > 0, segments))
    if len(rows) > bucket.batch:
        raise SpecError(f"{len(rows)} {kind.batch} for {bucket.name}, which holds {bucket.batch}")
    legal, check, sizes = ROWS[bucket.kind], kind.check, layout.sizes
    for row in rows:
        if not isinstance(row, legal):
            raise SpecError(f"a {type(row).__name__} for {bucket.name}; legal is {legal.__name__}")
        check(row, bucket, limits, sizes)
    arrays = _padding(layout)
    if rows:
        _fill(arrays, rows, layout)
    return arrays


def pack_columns(
    bucket: Bucket, columns: Mapping[str, npt.NDArray[Any]], tables: Tables, limits: Limits, *, max_logprobs: int = 0
) -> Arrays:
    """The same of rows that are a struct of arrays.

    Args:
        columns: by input a number of each row, or as many from the left as rows have at most; what the step does not take is left out.
        tables: what only some rows have, by the attribute of rows: number of the row, and what it has.

    Raises:
        SpecError: when there are more rows than the bucket holds.
    """
    arrays, count = _padding(_layout(StepInputs(bucket, limits, max_logprobs > 0, None))), len(columns["request_slots"])
    if count > bucket.batch:
        raise SpecError(f"{count} {kind_of(bucket).batch} for {bucket.name}, which holds {bucket.batch}")
    for name in columns.keys() & arrays.keys():
        column = columns[name]
        arrays[name][(slice(count), *map(slice, column.shape[1:]))] = column
    for name, having in tables.items():
        if having:
            _TABLES[name](arrays, having)
    return arrays


def _padding(layout: _Layout) -> Arrays:
    """Inputs without rows."""
    # New zeros rather than copies of them: memory that no step writes, as of most bitmasks, is never touched.
    return {name: np.full(shape, padding, dtype) if padding else np.zeros(shape, dtype) for name, shape, dtype, padding in layout.arrays}


@functools.cache
def _layout(inputs: StepInputs) -> _Layout:
    shapes = inputs.shapes()
    arrays = tuple((field.name, shape, DTYPES[field.dtype], field.padding) for field, shape in shapes)
    places: dict[str, list[tuple[str, int | None]]] = {}
    for field, shape in shapes:
        places.setdefault(field.row, []).append((field.name, 0 if len(shape) > 1 else None))
    spread = tuple((own[0][0], attrgetter(row[1:])) for row, own in places.items() if row.startswith("*"))
    numbers = {row: own for row, own in places.items() if row and not row.startswith("*")}
    columns = tuple((*own[0], attrgetter(row)) for row, own in numbers.items() if len(own) == 1)
    groups = tuple((tuple(name for name, _ in own), attrgetter(row)) for row, own in numbers.items() if len(own) > 1)
    tables = tuple((attrgetter(name), fill) for name, fill in _TABLES.items() if hasattr(ROWS[inputs.bucket.kind], name))
    return _Layout(arrays, columns, groups, spread, tables, inputs.sizes)


def _fill(arrays: Arrays, rows: Sequence[Row], layout: _Layout) -> None:
    live = slice(0, len(rows))
    for name, place, number in layout.columns:
        arrays[name][live if place is None else (live, place)] = list(map(number, rows))
    for names, items in layout.groups:
        for name, column in zip(names, zip(*map(items, rows), strict=True), strict=True):
            arrays[name][live] = column
    for name, sequence in layout.spread:
        array = arrays[name]
        width = array.shape[1]
        for i, numbers in enumerate(map(sequence, rows)):
            if len(numbers) >= width:
                # Random numbers may be for wider steps.
                array[i] = numbers[:width]
            elif numbers:
                array[i, : len(numbers)] = numbers
    for given, fill in layout.tables:
        if having := [(i, value) for i, value in enumerate(map(given, rows)) if value is not None]:
            fill(arrays, having)
    if "positions" in arrays:
        _fill_places(arrays, [row for row in rows if isinstance(row, PrefillRow)])


def _fill_bitmasks(arrays: Arrays, masked: Sequence[tuple[int, Bitmask]]) -> None:
    """Stores the bitmasks of rows in the order of the rows."""
    most = len(arrays.get("bitmask", ()))
    if len(masked) > most:
        raise SpecError(f"{len(masked)} rows with bitmasks; the step takes {most}")
    for place, (row, bitmask) in enumerate(masked):
        arrays["bitmask_rows"][row] = place + 1
        arrays["bitmask"][place] = bitmask


def _fill_patches(arrays: Arrays, pictures: Sequence[tuple[int, Any]]) -> None:
    """Patches of segments; a still picture stands in each of the frames of its patches."""
    for i, picture in pictures:
        count, own = picture.patches.shape
        by_frame = arrays["patches"][i, :count].reshape(count, CHANNELS, -1, own // CHANNELS)
        by_frame[:] = picture.patches.reshape(count, CHANNELS, 1, -1)


_TABLES: Mapping[str, Callable[[Arrays, Sequence[tuple[int, Any]]], None]] = {
    "bitmask": _fill_bitmasks,
    "adjustment": adjustments.fill,
    "picture": _fill_patches,
}
"""Fills the inputs of what only some rows have, or what is more than numbers, by the attribute of rows."""


def _fill_places(arrays: Arrays, rows: Sequence[PrefillRow]) -> None:
    """Positions on three axes and rows of pictures, in graphs that take them; text is at its index on all axes."""
    for i, row in enumerate(rows):
        count, places = len(row.tokens), row.places
        indices = np.arange(row.start, row.start + count, dtype=np.int32)[:, None]
        arrays["positions"][i, :count] = indices if places is None else places.positions
        if places is not None:
            arrays["picture_rows"][i, : count + 1] = places.picture_rows


def without_unused(arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The inputs without the bitmasks and adjustments that no row has, which are long and are not read."""
    used = {name: max(arrays[rows].max() for rows in whose) for name, whose in OPTIONAL_ROWS.items() if name in arrays}
    return {**arrays, **{name: arrays[name][:count] for name, count in used.items()}}


def with_all_rows(array: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """An input with as many rows as its graph takes; zeros where `without_unused` left them out."""
    if len(array) == rows:
        return array
    whole = np.zeros((rows, *array.shape[1:]), array.dtype)
    whole[: len(array)] = array
    return whole
