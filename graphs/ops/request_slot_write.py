"""Writes to the pool of request slots: what a step leaves for the next one."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class RequestSlotWrite(NamedTuple):
    """Operands of `request_slot_write`."""

    pool: Tensor  # [C, W] int32
    request_slots: Tensor  # [B] int32, no request slot twice but the null request slot 0, where any row may win
    values: Tensor  # [B, W] int32


# It donates nothing: the pool is a few numbers a request, and copying it is cheaper than arranging not to.
request_slot_write = Primitive("request_slot_write", RequestSlotWrite, factors="_ _, _, _ _ -> _ _")


@request_slot_write.abstract
def _abstract(args: RequestSlotWrite) -> Tensor:
    return torch.empty_like(args.pool)


@request_slot_write.reference
def request_slot_write_reference(args: RequestSlotWrite) -> Tensor:
    """Replaces the rows of some request slots.

    Returns:
        The pool with those rows replaced.
    """
    return args.pool.index_put((args.request_slots.long(),), args.values)


@request_slot_write.lowering("npu")
def _npu(args: RequestSlotWrite) -> Tensor:
    """A sum over the at most one row that each slot gets, since the device's scatters take no int32. The null slot keeps its values."""
    pool, request_slots, values = args
    request_slot = torch.arange(pool.shape[0], dtype=torch.int32, device=pool.device)
    mine = ((request_slot[:, None] == request_slots[None, :]) & (request_slot[:, None] > 0)).to(torch.int32)
    written = (mine[:, :, None] * values[None, :, :]).sum(1, dtype=torch.int32)
    return torch.where(mine.sum(1, keepdim=True, dtype=torch.int32) > 0, written, pool)


@request_slot_write.cost
def _cost(args: RequestSlotWrite) -> Cost:
    return Cost(0, nbytes(*args), nbytes(args.pool))
