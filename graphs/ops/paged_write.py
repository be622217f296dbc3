"""Writes of new rows to one paged pool."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class PagedWrite(NamedTuple):
    """Operands of `paged_write`."""

    cache: Tensor  # [pages, P, G, D] pool
    x: Tensor  # [T, G, D] in the pool's dtype
    slots: Tensor  # [T] integers `page * P + offset`; padding tokens point into page 0, where any of them may win


paged_write = Primitive("paged_write", PagedWrite, factors="_ _ g _, _ g _, _ -> _ _ g _", donates=((0, 0),))


@paged_write.reference
def paged_write_reference(args: PagedWrite) -> Tensor:
    """Writes each token's row to its slot.

    Returns:
        The pool with those slots replaced.
    """
    return args.cache.flatten(0, 1).index_put((args.slots.long(),), args.x).view(args.cache.shape)


@paged_write.inplace
def _inplace(args: PagedWrite) -> tuple[Tensor]:
    args.cache.view(-1, *args.x.shape[1:]).index_put_((args.slots.long(),), args.x)
    return (args.cache,)


@paged_write.lowering("npu")
def _npu(args: PagedWrite) -> Tensor:
    """A scatter in place; the NPU's writes of caches take two pools at once."""
    cache, x, slots = args
    P = cache.shape[1]
    places = torch.stack([slots // P, slots % P], 1)
    torch.ops.npu.npu_scatter_nd_update_(cache, places, x)
    return cache


@paged_write.cost
def _cost(args: PagedWrite) -> Cost:
    return Cost(0, nbytes(args.x, args.slots), nbytes(args.x))
