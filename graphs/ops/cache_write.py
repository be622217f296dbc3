"""Writes of new keys and values to the paged KV pool."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class CacheWrite(NamedTuple):
    """Operands of `cache_write`."""

    k_cache: Tensor  # [pages, P, G, D] pool
    v_cache: Tensor  # [pages, P, G, D] pool
    k: Tensor  # [T, G, D] in the pools' dtype
    v: Tensor  # [T, G, D]
    slots: Tensor  # [T] integers `page * P + offset`; padding tokens point into page 0, where any of them may win


cache_write = Primitive(
    "cache_write", CacheWrite, factors="_ _ g _, _ _ g _, _ g _, _ g _, _ -> _ _ g _, _ _ g _", donates=((0, 0), (1, 1))
)


@cache_write.reference
def cache_write_reference(args: CacheWrite) -> tuple[Tensor, Tensor]:
    """Writes each token's key and value to its slot.

    Returns:
        The pools with those slots replaced.
    """
    k_cache, v_cache, k, v, slots = args
    index = (slots.long(),)
    return (
        k_cache.flatten(0, 1).index_put(index, k).view(k_cache.shape),
        v_cache.flatten(0, 1).index_put(index, v).view(v_cache.shape),
    )


@cache_write.inplace
def _inplace(args: CacheWrite) -> tuple[Tensor, Tensor]:
    k_cache, v_cache, k, v, slots = args
    index = (slots.long(),)
    k_cache.view(-1, *k.shape[1:]).index_put_(index, k)
    v_cache.view(-1, *v.shape[1:]).index_put_(index, v)
    return k_cache, v_cache


@cache_write.lowering("npu")
def _npu(args: CacheWrite) -> Any:
    k_cache, v_cache, k, v, slots = args
    return torch.ops.npu.npu_scatter_pa_kv_cache_functional(k, v, k_cache, v_cache, slots, cache_mode="Norm")


@cache_write.cost
def _cost(args: CacheWrite) -> Cost:
    return Cost(0, nbytes(args.k, args.v, args.slots), nbytes(args.k, args.v))
