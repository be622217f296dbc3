"""Context parallelism: the devices of a group share the tokens of a prompt's chunk in attention too, where a layout has the axis `slices`.

A chunk of Q tokens is cut into 2 n slices for n devices, and device i has slices i and 2 n - 1 - i of each row: causal work grows along a
chunk, and each such pair has the same. SGLang calls it in-seq-split, others zigzag. Rows of a step's stream are in the order of devices,
then of rows of the step, then of their two slices. A device multiplies its own tokens by whole matrices, all keys are gathered and cached
on each, and the queries of a slice are a row of attention: its pages are those of its request, its first position is its own.
"""

from __future__ import annotations

import torch

from ..graphs import ops
from ..graphs.spmd.layout import num_shards

AXIS = "slices"


def shares(q_len: int) -> int:
    """n, the devices that share rows of so many tokens; 1 where each has all: in other layouts, and of rows that 2 n does not divide."""
    count = num_shards(AXIS)
    return count if q_len % (2 * count) == 0 else 1


def slices(size: int, q_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of the 2 n B slices, in the order of the stream: its row of the step, and its first token there; [2 n B] i32 each."""
    count = shares(q_len)
    each, shape = q_len // (2 * count), (count, size, 2)
    head = torch.arange(0, count * each, each, dtype=torch.int32, device=device)
    rows = torch.arange(size, dtype=torch.int32, device=device)
    tail = torch.arange(q_len - each, q_len // 2 - each, -each, dtype=torch.int32, device=device)
    first = torch.stack([head, tail], 1)[:, None]
    return rows[None, :, None].expand(shape).reshape(-1), first.expand(shape).reshape(-1)


def order(size: int, q_len: int, device: torch.device) -> torch.Tensor:
    """Which token of a step [B, Q], counted along its rows, is each of the stream: [T] i32."""
    rows, first = slices(size, q_len, device)
    tokens = torch.arange(q_len // (2 * shares(q_len)), dtype=torch.int32, device=device)
    return ((rows * q_len + first)[:, None] + tokens).reshape(-1)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """Values of a step's tokens [B, Q, ...] in the order of the stream: [T, ...]."""
    flat = x.flatten(0, 1)
    return flat if shares(x.shape[1]) == 1 else flat.index_select(0, order(x.shape[0], x.shape[1], x.device))


def inverse(size: int, q_len: int, device: torch.device) -> torch.Tensor:
    """Where in the stream each token of a step [B, Q] is, counted along its rows: [T] i32."""
    count = shares(q_len)
    each = q_len // (2 * count)
    tokens, rows = (torch.arange(n, dtype=torch.int32, device=device) for n in (each, size))
    # Nothing is divided: a slice of the first half is of the device that it is numbered by, one of the second of that from the end.
    share = 2 * size * each
    head = torch.arange(0, count * share, share, dtype=torch.int32, device=device)
    tail = torch.arange((count - 1) * share + each, each - share, -share, dtype=torch.int32, device=device)
    return (torch.cat([head, tail])[None, :, None] + 2 * each * rows[:, None, None] + tokens).reshape(-1)


def in_rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """The stream's rows in the order of the step's tokens: [T, M] -> [B*Q, M], of B = `size`."""
    q_len = x.shape[0] // size
    return x if shares(q_len) == 1 else x.index_select(0, inverse(size, q_len, x.device))


def last_rows(x: torch.Tensor, query_lens: torch.Tensor) -> torch.Tensor:
    """The stream's row of the last valid token of each row of a step: [T, M], [B] -> [B, M]."""
    size = query_lens.shape[0]
    q_len = x.shape[0] // size
    if shares(q_len) == 1:
        rows: torch.Tensor = ops.last_rows(x, query_lens)
        return rows
    last = (query_lens - 1).clamp(min=0)[:, None].to(torch.int64)
    return x.index_select(0, inverse(size, q_len, x.device).view(size, q_len).gather(1, last)[:, 0])
