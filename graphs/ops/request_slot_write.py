"""Writes to the pool of request slots: what a step leaves for the next one."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class SeatWrite(NamedTuple):
    """Operands of `seat_write`."""

    pool: Tensor  # [C, W] int32
    seats: Tensor  # [B] int32, no seat twice but the null seat 0, where any row may win
    values: Tensor  # [B, W] int32


# It donates nothing: the pool is a few numbers a request, and copying it is cheaper than arranging not to.
seat_write = Primitive("seat_write", SeatWrite, factors="_ _, _, _ _ -> _ _")


@seat_write.abstract
def _abstract(args: SeatWrite) -> Tensor:
    return torch.empty_like(args.pool)


@seat_write.reference
def seat_write_reference(args: SeatWrite) -> Tensor:
    """Replaces the rows of some seats.

    Returns:
        The pool with those rows replaced.
    """
    return args.pool.index_put((args.seats.long(),), args.values)


@seat_write.lowering("ge")
def _npu(args: SeatWrite) -> Tensor:
    """A sum over the at most one row that each seat gets, since the device's scatters take no int32. The null seat keeps its values."""
    pool, seats, values = args
    seat = torch.arange(pool.shape[0], dtype=torch.int32, device=pool.device)
    mine = ((seat[:, None] == seats[None, :]) & (seat[:, None] > 0)).to(torch.int32)
    given = (mine[:, :, None] * values[None, :, :]).sum(1, dtype=torch.int32)
    return torch.where(mine.sum(1, keepdim=True, dtype=torch.int32) > 0, given, pool)


@seat_write.cost
def _cost(args: SeatWrite) -> Cost:
    return Cost(0, nbytes(*args), nbytes(args.pool))
