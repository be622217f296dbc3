"""Positions of a step's tokens, and their slots in the paged KV pool."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class Positions(NamedTuple):
    """Operands of `positions`."""

    starts: Tensor  # [B] int32 position of each row's first token
    q_len: int  # Q


class CacheSlots(NamedTuple):
    """Operands of `cache_slots`."""

    starts: Tensor  # [B] int32 position of each row's first token
    lengths: Tensor  # [B] int32 valid tokens
    page_table: Tensor  # [B, N] int32
    page_size: int  # P
    q_len: int  # Q


positions = Primitive("positions", Positions, factors="_ -> _")
cache_slots = Primitive("cache_slots", CacheSlots, factors="_, _, _ _ -> _")


@positions.abstract
def _positions_abstract(args: Positions) -> Tensor:
    return torch.empty(args.starts.shape[0] * args.q_len, dtype=args.starts.dtype, device=args.starts.device)


@positions.reference
def positions_reference(args: Positions) -> Tensor:
    """Position of every token of a step, padding included.

    Returns:
        [T] int32, `starts[b] + t`.
    """
    starts, q_len = args
    return (starts[:, None] + torch.arange(q_len, dtype=starts.dtype, device=starts.device)).reshape(-1)


positions.lowering("ge")(positions_reference)


@positions.cost
def _positions_cost(args: Positions) -> Cost:
    return Cost(args.starts.numel() * args.q_len, nbytes(args.starts), nbytes(args.starts) * args.q_len)


@cache_slots.abstract
def _slots_abstract(args: CacheSlots) -> Tensor:
    return torch.empty(args.starts.shape[0] * args.q_len, dtype=args.starts.dtype, device=args.starts.device)


@cache_slots.reference
def cache_slots_reference(args: CacheSlots) -> Tensor:
    """Flat slot `page * P + offset` of every token; padding tokens get slots of the null page 0.

    Returns:
        [T] int32.
    """
    starts, lengths, page_table, page_size, q_len = args
    step = torch.arange(q_len, dtype=starts.dtype, device=starts.device)
    position = starts[:, None] + step
    entry = torch.div(position, page_size, rounding_mode="floor").clamp(max=page_table.shape[1] - 1)
    page = torch.where(step < lengths[:, None], page_table.gather(1, entry.long()), 0)
    return (page * page_size + position % page_size).reshape(-1)


@cache_slots.lowering("ge")
def _slots_npu(args: CacheSlots) -> Any:
    starts, lengths, page_table, page_size, q_len = args
    step = torch.arange(q_len, dtype=starts.dtype, device=starts.device)
    position = starts[:, None] + step
    entry = (position // page_size).clamp(max=page_table.shape[1] - 1)
    valid = (step < lengths[:, None]).to(starts.dtype)
    return (page_table.gather(1, entry.long()) * valid * page_size + position % page_size).reshape(-1)


@cache_slots.cost
def _slots_cost(args: CacheSlots) -> Cost:
    starts = args.starts
    return Cost(6 * starts.numel() * args.q_len, nbytes(starts, args.lengths, args.page_table), nbytes(starts) * args.q_len)
