"""Turns new keys and values into entries of the paged KV pool."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

cache_write = Primitive(
    "cache_write",
    "(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor slots) -> (Tensor, Tensor)",
    factors="_ _ g _, _ _ g _, _ g _, _ g _, _ -> _ _ g _, _ _ g _",
    donates=((0, 0), (1, 1)),
)


@cache_write.abstract
def _abstract(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(k_cache), torch.empty_like(v_cache)


@cache_write.reference
def cache_write_reference(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes each token's key and value to its slot.

    Args:
        k_cache, v_cache: [pages, P, G, D] pools.
        k, v: [T, G, D] in the pools' dtype.
        slots: [T] integers `page * P + offset`; padding tokens point into page 0, where any of them may win.

    Returns:
        The pools with those slots replaced.
    """
    at = (slots.long(),)
    return (
        k_cache.flatten(0, 1).index_put(at, k).view(k_cache.shape),
        v_cache.flatten(0, 1).index_put(at, v).view(v_cache.shape),
    )


@cache_write.inplace
def _inplace(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    at = (slots.long(),)
    k_cache.view(-1, *k.shape[1:]).index_put_(at, k)
    v_cache.view(-1, *v.shape[1:]).index_put_(at, v)
    return k_cache, v_cache


@cache_write.lowering("ge")
def _npu(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
    return torch.ops.npu.npu_scatter_pa_kv_cache_functional(k, v, k_cache, v_cache, slots, cache_mode="Norm")


@cache_write.cost
def _cost(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Cost:
    return Cost(0, nbytes(k, v, slots), nbytes(k, v))
