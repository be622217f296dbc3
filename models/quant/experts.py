"""The experts' products over rows grouped by expert, in whatever format the experts are stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...graphs import ops
from ...graphs.types import Tree
from .formats import FLOAT, UNROUNDED, W4A16, W8A8_DYNAMIC
from .product import format_of, split_parts


def rounds_rows(gate_up: Tree) -> bool:
    """Whether the experts' products read int8 rows."""
    return format_of(gate_up) not in UNROUNDED


def grouped(rows: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, gate_up: Tree, down: Tree, dtype: torch.dtype) -> torch.Tensor:
    """SwiGLU of rows grouped by expert: [R, M] -> [R, M]; a partial sum of it where each expert is split.

    Args:
        rows, scale, counts: what `moe_sort` or `moe_dispatch` gave.
        gate_up, down: weights [E, 2, F, M] and [E, M, F], stored for grouped products.
        dtype: of the result.
    """
    form = format_of(gate_up)
    if form == FLOAT:
        plain: torch.Tensor = ops.grouped_experts(rows, counts, gate_up["weight"].flatten(2), down["weight"])
        return plain
    if form == W4A16:
        whole: torch.Tensor = ops.grouped_experts_w4a16(rows, counts, *operands_of_one(gate_up, down))
        return whole
    product = ops.grouped_experts_w8a8 if form == W8A8_DYNAMIC else ops.grouped_experts_w4a8
    parts = split_parts(down, 1)
    outs = []
    for index, part in enumerate(parts):
        # Each rank rounds the hidden values of its own channels.
        channels = _channels(gate_up, index, len(parts))
        outs.append(product(rows, scale, counts, *channels.values(), *part.values(), dtype))
    total: torch.Tensor = outs[0]
    for out in outs[1:]:
        total = total + out
    return total


def operands_of_one(gate_up: Mapping[str, torch.Tensor], down: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The operands of a product of quantised experts that no layout splits: both weights, each followed by its scales."""
    (part,) = split_parts(down, 1)
    return *_channels(gate_up, 0, 1).values(), *part.values()


def _channels(gate_up: Mapping[str, torch.Tensor], index: int, count: int) -> dict[str, torch.Tensor]:
    """A part of the channels, gate and up of it side by side in one dimension."""
    parts = {name: tensor.chunk(count, -1)[index] if count > 1 else tensor for name, tensor in gate_up.items()}
    return {name: tensor.flatten(-2) for name, tensor in parts.items()}
