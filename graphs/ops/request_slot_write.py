"""Writes to the pool of request slots: what a step leaves for the next one."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class RequestSlotWrite(NamedTuple):
    """Operands of `request_slot_write`."""

    pool: Tensor  # [C, W] int32
    request_slots: Tensor  # [B] int32, no request slot twice but the null request slot 0, which keeps its values
    values: Tensor  # [B, W] int32


# It donates nothing: the pool is a few numbers a request, and copying it is cheaper than arranging not to.
request_slot_write = Primitive("request_slot_write", RequestSlotWrite, factors="_ _, _, _ _ -> _ _", like="pool")


@request_slot_write.reference
def request_slot_write_reference(args: RequestSlotWrite) -> Tensor:
    """Replaces the rows of some request slots, but never those of the null one.

    Returns:
        The pool with those rows replaced.
    """
    pool, request_slots, values = args
    values = torch.where(request_slots[:, None] > 0, values, pool[:1])
    return pool.index_put((request_slots.long(),), values)


@request_slot_write.lowering("npu")
def _npu(args: RequestSlotWrite) -> Tensor:
    """Each slot gathers the row that was written for it, or its own, since the device's scatters take no int32."""
    pool, request_slots, values = args
    (B, C), device = (values.shape[0], pool.shape[0]), pool.device
    # No row is written for a slot of this number, which stands for the null one.
    request_slot = torch.cat([torch.full((1,), -1, dtype=torch.int32, device=device), torch.arange(1, C, dtype=torch.int32, device=device)])
    row, own = torch.arange(B + C, dtype=torch.float32, device=device).split([B, C])
    source = torch.where(request_slot[:, None] == request_slots, row, own[:, None]).amin(1)
    return torch.cat([values, pool]).index_select(0, source.to(torch.int32))


@request_slot_write.cost
def _cost(args: RequestSlotWrite) -> Cost:
    return Cost(0, nbytes(*args), nbytes(args.pool))
