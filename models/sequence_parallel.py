"""Sequence parallelism: the residual stream split by tokens between products, where a layout splits it.

With expert parallelism each device dispatches its own share of the tokens, so between a row-parallel and the next column-parallel
product it needs that share alone. A reduce-scatter before the experts and an all-gather after them then suffice; an all-reduce before
and an all-gather after would move half as many bytes again.
"""

from __future__ import annotations

import torch

from ..graphs import ops
from ..graphs.spmd.layout import constrain, num_shards
from ..graphs.spmd.region import Sum, axis_index, shard_map
from ..graphs.types import Tree
from . import context_parallel, quant
from .batch import Batch


def padded(tokens: int) -> int:
    """Rows of the stream: tokens, rounded up to a multiple of the devices that share them."""
    share = num_shards("tokens")
    return -(-tokens // share) * share


def whole(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """All `tokens` rows of the stream on every device of the group, as a column-parallel product reads them."""
    x = constrain(x, None, None)
    return x if x.shape[0] == tokens else x[:tokens]


def behind(x: torch.Tensor, earlier: torch.Tensor, axis: str | None = None) -> torch.Tensor:
    """The stream, of which nothing is gathered before `earlier` [T, N] is there, whose rows are laid out by `axis`."""
    if num_shards("tokens") == 1:
        return x
    return shard_map(ops.behind, [(x, ("tokens", None)), (earlier, (axis, None))], ("tokens", None))


def spread(x: torch.Tensor) -> torch.Tensor:
    """Lays out as the stream what every device has all of: [T, M] -> [padded(T), M]."""
    missing = padded(x.shape[0]) - x.shape[0]
    return constrain(torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x, "tokens", None)


def project(x: torch.Tensor, weight: Tree, axis: str) -> torch.Tensor:
    """A row-parallel product whose sum is laid out as the stream: [T, K] -> [padded(T), M]; `axis` is the logical axis of K."""
    missing = padded(x.shape[0]) - x.shape[0]
    x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    return constrain(quant.row_parallel(x, weight, axis), "tokens", None)


def of_queries(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The rows of the stream that a device makes queries of: its own where devices share tokens, else all, as `whole`."""
    return whole(x, batch.size * batch.q_len) if batch.sliced is None else x


def of_attention(x: torch.Tensor, weight: Tree, batch: Batch) -> torch.Tensor:
    """The projection behind attention, laid out as the stream: [T, H*D] -> [padded(T), M]. Devices that share tokens have all heads."""
    if batch.sliced is None:
        return project(x, weight, "q_heads")
    return quant.row_parallel(x, weight, "q_heads", rows=context_parallel.AXIS)


def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Looks up tokens in an embedding table that may be split over the vocabulary.

    Args:
        tokens: [T] ids.
        table: [V, M].

    Returns:
        [padded(T), M], laid out as the stream.
    """
    missing = padded(tokens.shape[0]) - tokens.shape[0]
    # Not `pad`, which the NPU has for no integers.
    tokens = torch.cat([tokens, tokens.new_zeros(missing)]) if missing else tokens
    if num_shards("vocab") == 1:
        return constrain(ops.embed(tokens, table), "tokens", None)
    x = shard_map(_local_rows, [(tokens, (None,)), (table, ("vocab", None))], Sum("vocab"))
    return constrain(x, "tokens", None)


def embed_with_pictures(tokens: torch.Tensor, table: torch.Tensor, inputs: Tree) -> torch.Tensor:
    """The same, with rows of pictures in the places of tokens that have them (PICTURE_INPUTS); other steps have none."""
    stream = embed(tokens, table)
    if "picture_rows" not in inputs:
        return stream
    rows = context_parallel.ordered(inputs["picture_rows"])
    missing = stream.shape[0] - rows.shape[0]
    rows = constrain(torch.cat([rows, rows.new_zeros(missing)]) if missing else rows, "tokens")
    pictures = constrain(ops.embed(rows, inputs["picture_pool"]), "tokens", None)
    return torch.where((rows > 0)[:, None], pictures, stream)


def _local_rows(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of this device's part of the table, zeros for tokens of other parts."""
    index = tokens - axis_index("vocab") * table.shape[0]
    nearest = index.clamp(0, table.shape[0] - 1)
    rows: torch.Tensor = ops.embed(nearest, table)
    return torch.where((index == nearest)[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
