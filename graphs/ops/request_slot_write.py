"""Turns what a step leaves for the next one into rows of the pool of seats."""

import torch

from ..primitive import Cost, Primitive, nbytes

# It donates nothing: the pool is a few numbers a request, and copying it is cheaper than arranging not to.
seat_write = Primitive("seat_write", "(Tensor pool, Tensor seats, Tensor values) -> Tensor", factors="_ _, _, _ _ -> _ _")


@seat_write.abstract
def _abstract(pool: torch.Tensor, seats: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(pool)


@seat_write.reference
def seat_write_reference(pool: torch.Tensor, seats: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Replaces the rows of some seats.

    Args:
        pool: [C, W] int32.
        seats: [B] int32, no seat twice but the null seat 0, where any row may win.
        values: [B, W] int32.

    Returns:
        The pool with those rows replaced.
    """
    return pool.index_put((seats.long(),), values)


@seat_write.lowering("ge")
def _npu(pool: torch.Tensor, seats: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sum over the one row that each seat gets, if any: the device's scatters take no int32. The null seat keeps what it holds."""
    seat = torch.arange(pool.shape[0], dtype=torch.int32, device=pool.device)
    mine = ((seat[:, None] == seats[None, :]) & (seat[:, None] > 0)).to(torch.int32)
    given = (mine[:, :, None] * values[None, :, :]).sum(1, dtype=torch.int32)
    return torch.where(mine.sum(1, keepdim=True, dtype=torch.int32) > 0, given, pool)


@seat_write.cost
def _cost(pool: torch.Tensor, seats: torch.Tensor, values: torch.Tensor) -> Cost:
    return Cost(0, nbytes(pool, seats, values), nbytes(pool))
