"""Takes a matrix that is joined of several tensors apart where these have different formats."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch

from ...graphs.errors import CheckpointError, ModelError
from ..params import Param, Source
from .formats import W4A8_DYNAMIC, Formats

COLUMN = "column"
"""Role of a matrix whose contraction no layout splits: the only one that is joined of tensors and can be taken apart."""


def apart(param: Param, formats: Formats) -> list[Param]:
    """The parameter, or one for each run of neighbouring tensors of it that have one format: a recipe may leave one of two float.

    Such a part is `[groups, rows, K]`: the matrix consists of groups of rows, such as those of a key-value head, and in each of them the
    parts lie one behind the other. Their products, joined along the rows of each group, are the product of the matrix.

    Raises:
        CheckpointError: the formats differ, and the matrix cannot be taken apart.
    """
    names = param.source.names
    forms = [formats.of([name]) for name in names]
    if param.role != COLUMN or len(set(forms)) == 1:
        return [param]
    if W4A8_DYNAMIC in forms:
        each = ", ".join(f"{name} is {form}" for name, form in zip(names, forms, strict=True))
        raise CheckpointError(f"{each}; they read the same rounded activations, which int4's kernel overwrites, and must have one format")
    runs = [[index for index, _ in run] for _, run in groupby(enumerate(forms), lambda pair: pair[1])]
    owner = [number for number, run in enumerate(runs) for _ in run]
    ids, groups, widths = _groups(param, owner)
    axes = _axes(param, groups, widths)
    if axes is None:
        formats.of(names)  # raises
        return [param]
    return [_part(param, run, ids == number, (groups, widths[number]), axes) for number, run in enumerate(runs)]


def _groups(param: Param, owner: list[int]) -> tuple[torch.Tensor, int, list[int]]:
    """Which part each row of the matrix is of, how many groups of rows there are, and each part's rows in one; 0 groups if none repeats."""
    # Heads of zeros are rows of the tensors that the real ones are of.
    source = param.source.padded_from or param.source
    columns = [torch.full((shape[0], 1), number, device="cpu") for shape, number in zip(source.shapes, owner, strict=True)]
    ids = source.join(*columns).flatten()
    order, counts = (each.tolist() for each in ids.unique_consecutive(return_counts=True))
    count = len(set(owner))
    groups = len(order) // count
    repeats = order == [*range(count)] * groups and counts == counts[:count] * groups
    return ids, groups if repeats else 0, counts[:count]


def _axes(param: Param, groups: int, widths: list[int]) -> tuple[str | None, str | None, None] | None:
    """Logical axes of the parts; None where a rank's slice of the matrix would not be the same slice of each part."""
    *out, _ = param.aval.shape
    *axes, _ = param.aval.axes
    if len(out) == 1 and groups:
        return axes[0], None, None
    if len(out) == 2 and groups == 1 and axes[0] is None and widths == [out[1]] * out[0]:
        return None, axes[1], None
    return None


def _part(param: Param, members: list[int], rows: torch.Tensor, shape: tuple[int, int], axes: tuple[str | None, str | None, None]) -> Param:
    """The part of the tensors `members`, which has some rows of the matrix. A rank reads them whole: few matrices are taken apart."""
    source = param.source

    def join(*own: torch.Tensor) -> torch.Tensor:
        given, absent = iter(own), own[0].new_zeros(())
        tensors = [
            next(given) if index in members else absent.expand(size[0], own[0].shape[-1]) for index, size in enumerate(source.shapes)
        ]
        return source.join(*tensors).flatten(0, -2)[rows].view(*shape, -1)

    names, shapes = tuple(source.names[index] for index in members), tuple(source.shapes[index] for index in members)
    aval = replace(param.aval, shape=(*shape, param.aval.shape[-1]), axes=axes)
    return Param(aval, Source(names, shapes, join, _one_way, unread=source.unread), param.init, param.role)


def _one_way(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise ModelError("a matrix that was taken apart cannot be turned back into the tensors of a checkpoint")
