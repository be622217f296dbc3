"""Writes of new rows to one paged pool of int8, with a scale of each row in a pool beside it."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows


class QuantPagedWrite(NamedTuple):
    """Operands of `quant_paged_write`."""

    cache: Tensor  # [pages, P, G, D] int8 pool
    scale: Tensor  # [pages, P, G] f16 pool
    x: Tensor  # [T, G, D]
    slots: Tensor  # as of `paged_write`


quant_paged_write = Primitive(
    "quant_paged_write", QuantPagedWrite, factors="_ _ g _, _ _ g, _ g _, _ -> _ _ g _, _ _ g", donates=((0, 0), (1, 1))
)


@quant_paged_write.reference
def quant_paged_write_reference(args: QuantPagedWrite) -> tuple[Tensor, Tensor]:
    """Rounds each row to int8 by its largest value, and writes integers and scale to the token's slot.

    Scales are in f16, as the NPU's indexer reads them.

    Returns:
        Both pools with those slots replaced.
    """
    return _written(args._replace(cache=args.cache.clone(), scale=args.scale.clone()))


@quant_paged_write.inplace
def _written(args: QuantPagedWrite) -> tuple[Tensor, Tensor]:
    cache, scale, x, slots = args
    rows, new = quantise_rows(x)
    for pool, values in ((cache, rows), (scale, new.to(scale.dtype))):
        pool.view(-1, *values.shape[1:]).index_put_((slots.long(),), values)
    return cache, scale


@quant_paged_write.lowering("npu")
def _npu(args: QuantPagedWrite) -> tuple[Tensor, Tensor]:
    """A rounding kernel, and a scatter in place for each pool."""
    cache, scale, x, slots = args
    rows, new = torch.ops.npu.npu_dynamic_quant(x)
    P = cache.shape[1]
    places = torch.stack([slots // P, slots % P], 1)
    torch.ops.npu.npu_scatter_nd_update_(cache, places, rows)
    torch.ops.npu.npu_scatter_nd_update_(scale, places, new.to(scale.dtype))
    return cache, scale


@quant_paged_write.cost
def _cost(args: QuantPagedWrite) -> Cost:
    rows = args.x.shape[0] * args.x.shape[1]
    return Cost(2 * args.x.numel(), nbytes(args.x, args.slots), args.x.numel() + 2 * rows)
