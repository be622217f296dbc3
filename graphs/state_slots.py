"""Reads and writes of recurrent states in their slots."""

import torch


def read_states(pool: torch.Tensor, read: torch.Tensor, num_computed_tokens: torch.Tensor) -> torch.Tensor:
    """States the rows start from.

    Args:
        pool: [S, ...].
        read: [B] slot of each row.
        num_computed_tokens: [B] tokens before this step; a row with 0 starts from zeros whatever its slot holds.

    Returns:
        [B, ...], dtype of the pool.
    """
    fresh = (num_computed_tokens == 0).view(-1, *(1,) * (pool.dim() - 1))
    return torch.where(fresh, torch.zeros((), dtype=pool.dtype, device=pool.device), pool.index_select(0, read))


def states_to_write(write: torch.Tensor, query_lens: torch.Tensor, q_len: int) -> torch.Tensor:
    """Number of a row's tokens that each written state has consumed.

    Args:
        write: [B, W]; W == q_len stores the state after every token, W == 1 after the last valid token.
        query_lens: [B] valid tokens.
        q_len: Q.

    Returns:
        [B, W] int32.
    """
    if write.shape[1] == q_len:
        return torch.arange(1, q_len + 1, dtype=torch.int32, device=write.device).expand(write.shape)
    return query_lens[:, None]


def write_states_npu(pool: torch.Tensor, write: torch.Tensor, states: torch.Tensor) -> None:
    """Stores states in their slots, in place, by an operator of the NPU.

    GE orders it after the reads of the pool that the states depend on, and after no other read.

    Args:
        pool: [S, ...].
        write: [B, W] slots.
        states: [B*W, ...], any float dtype.
    """
    torch.ops.npu.npu_scatter_nd_update_(pool, write.reshape(-1, 1), states.to(pool.dtype))


def num_accepted_tokens(read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
    """1 + where `read` [B] is in `write` [B, Q], int32 [B]; within 1..Q even for padding, whose slots are all the same."""
    Q = write.shape[1]
    position = torch.arange(1, Q + 1, dtype=torch.int32, device=write.device)
    return ((write == read[:, None]).to(torch.int32) * position).sum(-1, dtype=torch.int32).clamp(1, Q)
