"""Positions of a step's tokens, and their slots in the paged KV pool."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class Positions(NamedTuple):
    """Operands of `positions`."""

    num_computed_tokens: Tensor  # [B] int32 position of each row's first token
    q_len: int  # Q


class SlotMapping(NamedTuple):
    """Operands of `slot_mapping`."""

    num_computed_tokens: Tensor  # [B] int32 position of each row's first token
    query_lens: Tensor  # [B] int32 valid tokens
    page_table: Tensor  # [B, N] int32
    page_size: int  # P
    q_len: int  # Q


positions = Primitive("positions", Positions, factors="_ -> _")
slot_mapping = Primitive("slot_mapping", SlotMapping, factors="_, _, _ _ -> _")


def _abstract(args: Positions | SlotMapping) -> Tensor:
    return args.num_computed_tokens.new_empty(args.num_computed_tokens.shape[0] * args.q_len)


positions.abstract(_abstract)
slot_mapping.abstract(_abstract)


@positions.reference
def positions_reference(args: Positions) -> Tensor:
    """Position of every token of a step, padding included.

    Returns:
        [T] int32, `num_computed_tokens[b] + t`.
    """
    start = args.num_computed_tokens
    return (start[:, None] + torch.arange(args.q_len, dtype=start.dtype, device=start.device)).reshape(-1)


positions.lowering("npu")(positions_reference)


@positions.cost
def _positions_cost(args: Positions) -> Cost:
    start = args.num_computed_tokens
    return Cost(start.numel() * args.q_len, nbytes(start), nbytes(start) * args.q_len)


@slot_mapping.reference
def slot_mapping_reference(args: SlotMapping) -> Tensor:
    """Flat slot `page * P + offset` of every token; padding tokens get slots of the null page 0.

    Returns:
        [T] int32.
    """
    start, query_lens, page_table, page_size, q_len = args
    step = torch.arange(q_len, dtype=start.dtype, device=start.device)
    position = start[:, None] + step
    entry = torch.div(position, page_size, rounding_mode="floor").clamp(max=page_table.shape[1] - 1)
    page = torch.where(step < query_lens[:, None], page_table.gather(1, entry.long()), 0)
    return (page * page_size + position % page_size).reshape(-1)


@slot_mapping.lowering("npu")
def _slots_npu(args: SlotMapping) -> Any:
    start, query_lens, page_table, page_size, q_len = args
    step = torch.arange(q_len, dtype=start.dtype, device=start.device)
    position = start[:, None] + step
    entry = (position // page_size).clamp(max=page_table.shape[1] - 1)
    valid = (step < query_lens[:, None]).to(start.dtype)
    return (page_table.gather(1, entry.long()) * valid * page_size + position % page_size).reshape(-1)


@slot_mapping.cost
def _slots_cost(args: SlotMapping) -> Cost:
    start = args.num_computed_tokens
    return Cost(6 * start.numel() * args.q_len, nbytes(start, args.query_lens, args.page_table), nbytes(start) * args.q_len)
