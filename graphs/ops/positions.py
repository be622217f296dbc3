"""Turns where each row starts into its tokens' positions, and those into slots of the paged KV pool."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

positions = Primitive("positions", "(Tensor starts, int q_len) -> Tensor", factors="_ -> _")
cache_slots = Primitive(
    "cache_slots", "(Tensor starts, Tensor lengths, Tensor page_table, int page_size, int q_len) -> Tensor", factors="_, _, _ _ -> _"
)


@positions.abstract
def _positions_abstract(starts: torch.Tensor, q_len: int) -> torch.Tensor:
    return torch.empty(starts.shape[0] * q_len, dtype=starts.dtype, device=starts.device)


@positions.reference
def positions_reference(starts: torch.Tensor, q_len: int) -> torch.Tensor:
    """Position of every token of a step, padding included.

    Args:
        starts: [B] int32 position of each row's first token.
        q_len: Q.

    Returns:
        [T] int32, `starts[b] + t`.
    """
    return (starts[:, None] + torch.arange(q_len, dtype=starts.dtype, device=starts.device)).reshape(-1)


positions.lowering("ge")(positions_reference)


@positions.cost
def _positions_cost(starts: torch.Tensor, q_len: int) -> Cost:
    return Cost(starts.numel() * q_len, nbytes(starts), nbytes(starts) * q_len)


@cache_slots.abstract
def _slots_abstract(starts: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor, page_size: int, q_len: int) -> torch.Tensor:
    return torch.empty(starts.shape[0] * q_len, dtype=starts.dtype, device=starts.device)


@cache_slots.reference
def cache_slots_reference(
    starts: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor, page_size: int, q_len: int
) -> torch.Tensor:
    """Flat slot `page * P + offset` of every token; padding tokens get slots of the null page 0.

    Args:
        starts, lengths: [B] int32 position of the first token, and valid tokens.
        page_table: [B, N] int32.
        page_size: P.
        q_len: Q.

    Returns:
        [T] int32.
    """
    step = torch.arange(q_len, dtype=starts.dtype, device=starts.device)
    at = starts[:, None] + step
    entry = torch.div(at, page_size, rounding_mode="floor").clamp(max=page_table.shape[1] - 1)
    page = torch.where(step < lengths[:, None], page_table.gather(1, entry.long()), 0)
    return (page * page_size + at % page_size).reshape(-1)


@cache_slots.lowering("ge")
def _slots_npu(starts: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor, page_size: int, q_len: int) -> Any:
    step = torch.arange(q_len, dtype=starts.dtype, device=starts.device)
    at = starts[:, None] + step
    entry = (at // page_size).clamp(max=page_table.shape[1] - 1)
    valid = (step < lengths[:, None]).to(starts.dtype)
    return (page_table.gather(1, entry.long()) * valid * page_size + at % page_size).reshape(-1)


@cache_slots.cost
def _slots_cost(starts: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor, page_size: int, q_len: int) -> Cost:
    return Cost(6 * starts.numel() * q_len, nbytes(starts, lengths, page_table), nbytes(starts) * q_len)
