"""Positions of a step's tokens, and their slots in the paged KV pool."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class Positions(NamedTuple):
    """Operands of `positions`."""

    num_computed_tokens: Tensor  # [B] int32 position of each row's first token
    q_len: int  # Q


class CacheSlots(NamedTuple):
    """Operands of `slot_mapping`."""

    num_computed_tokens: Tensor  # [B] int32 position of each row's first token
    query_lens: Tensor  # [B] int32 valid tokens
    page_table: Tensor  # [B, N] int32
    page_size: int  # P
    q_len: int  # Q


positions = Primitive("positions", Positions, factors="_ -> _")
slot_mapping = Primitive("slot_mapping", CacheSlots, factors="_, _, _ _ -> _")


@positions.abstract
def _positions_abstract(args: Positions) -> Tensor:
    return torch.empty(
        args.num_computed_tokens.shape[0] * args.q_len, dtype=args.num_computed_tokens.dtype, device=args.num_computed_tokens.device
    )


@positions.reference
def positions_reference(args: Positions) -> Tensor:
    """Position of every token of a step, padding included.

    Returns:
        [T] int32, `num_computed_tokens[b] + t`.
    """
    num_computed_tokens, q_len = args
    return (num_computed_tokens[:, None] + torch.arange(q_len, dtype=num_computed_tokens.dtype, device=num_computed_tokens.device)).reshape(
        -1
    )


positions.lowering("ge")(positions_reference)


@positions.cost
def _positions_cost(args: Positions) -> Cost:
    return Cost(
        args.num_computed_tokens.numel() * args.q_len, nbytes(args.num_computed_tokens), nbytes(args.num_computed_tokens) * args.q_len
    )


@slot_mapping.abstract
def _slots_abstract(args: CacheSlots) -> Tensor:
    return torch.empty(
        args.num_computed_tokens.shape[0] * args.q_len, dtype=args.num_computed_tokens.dtype, device=args.num_computed_tokens.device
    )


@slot_mapping.reference
def cache_slots_reference(args: CacheSlots) -> Tensor:
    """Flat slot `page * P + offset` of every token; padding tokens get slots of the null page 0.

    Returns:
        [T] int32.
    """
    num_computed_tokens, query_lens, page_table, page_size, q_len = args
    step = torch.arange(q_len, dtype=num_computed_tokens.dtype, device=num_computed_tokens.device)
    position = num_computed_tokens[:, None] + step
    entry = torch.div(position, page_size, rounding_mode="floor").clamp(max=page_table.shape[1] - 1)
    page = torch.where(step < query_lens[:, None], page_table.gather(1, entry.long()), 0)
    return (page * page_size + position % page_size).reshape(-1)


@slot_mapping.lowering("ge")
def _slots_npu(args: CacheSlots) -> Any:
    num_computed_tokens, query_lens, page_table, page_size, q_len = args
    step = torch.arange(q_len, dtype=num_computed_tokens.dtype, device=num_computed_tokens.device)
    position = num_computed_tokens[:, None] + step
    entry = (position // page_size).clamp(max=page_table.shape[1] - 1)
    valid = (step < query_lens[:, None]).to(num_computed_tokens.dtype)
    return (page_table.gather(1, entry.long()) * valid * page_size + position % page_size).reshape(-1)


@slot_mapping.cost
def _slots_cost(args: CacheSlots) -> Cost:
    num_computed_tokens = args.num_computed_tokens
    return Cost(
        6 * num_computed_tokens.numel() * args.q_len,
        nbytes(num_computed_tokens, args.query_lens, args.page_table),
        nbytes(num_computed_tokens) * args.q_len,
    )
