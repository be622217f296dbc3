"""Turns the residual stream from whole to split by tokens and back, where a layout splits it.

Where experts are spread over all devices, each device sends tokens of its own to them. Between a row-parallel and the next
column-parallel product it then needs its share of the tokens alone: a reduce-scatter before the experts and a gather after them,
where an all-reduce before and a gather after would move half as much again.
"""

from __future__ import annotations

import torch

from ..graphs import ops
from ..graphs.spmd.layout import constrain, num_shards
from ..graphs.spmd.region import Sum, axis_index, shard_map


def padded(tokens: int) -> int:
    """Rows of the stream: tokens, rounded up to what the layout splits evenly."""
    share = num_shards("tokens")
    return -(-tokens // share) * share


def whole(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """All `tokens` rows of the stream on every device of the group: what a column-parallel product reads."""
    x = constrain(x, None, None)
    return x if x.shape[0] == tokens else x[:tokens]


def spread(x: torch.Tensor) -> torch.Tensor:
    """Rows that every device has, laid out as the stream: [T, M] -> [padded(T), M]."""
    short = padded(x.shape[0]) - x.shape[0]
    return constrain(torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x, "tokens", None)


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A row-parallel product, its sum laid out as the stream: [T, K] -> [padded(T), M]."""
    short = padded(x.shape[0]) - x.shape[0]
    x = torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x
    return constrain(ops.linear(x, weight), "tokens", None)


def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding table that may be split over the vocabulary, laid out as the stream.

    Args:
        tokens: [T] ids.
        table: [V, M].

    Returns:
        [padded(T), M].
    """
    short = padded(tokens.shape[0]) - tokens.shape[0]
    tokens = torch.nn.functional.pad(tokens, (0, short)) if short else tokens
    if num_shards("vocab") == 1:
        return constrain(ops.embed(tokens, table), "tokens", None)
    x = shard_map(_own_rows, [(tokens, (None,)), (table, ("vocab", None))], Sum("vocab"))
    return constrain(x, "tokens", None)


def _own_rows(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows this device has, zeros for those it has not."""
    index = tokens - axis_index("vocab") * table.shape[0]
    mine = (index >= 0) & (index < table.shape[0])
    rows: torch.Tensor = ops.embed(torch.where(mine, index, 0), table)
    return torch.where(mine[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
