"""Writes of new keys and values to a paged KV pool of int8: with a scale of each token and head, or of each head and channel."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows
from .cache_write import CacheWrite, cache_write_reference


class QuantCacheWrite(NamedTuple):
    """Operands of `quant_cache_write`."""

    k_cache: Tensor  # [pages, P, G, D] int8 pool
    v_cache: Tensor  # [pages, P, G, D] int8 pool
    k_scale: Tensor  # [pages, G, P] f32 pool
    v_scale: Tensor  # [pages, G, P] f32 pool
    k: Tensor  # [T, G, D]
    v: Tensor  # [T, G, D]
    slots: Tensor  # [T] integers `page * P + offset`; padding tokens point into page 0, where any of them may win


class StaticCacheWrite(NamedTuple):
    """Operands of `static_cache_write`."""

    k_cache: Tensor  # [pages, P, G, D] int8 pool
    v_cache: Tensor  # [pages, P, G, D] int8 pool
    k: Tensor  # [T, G, D]
    v: Tensor  # [T, G, D]
    k_scale: Tensor  # [G, D] f32
    v_scale: Tensor  # [G, D] f32
    slots: Tensor  # as of `quant_cache_write`


quant_cache_write = Primitive(
    "quant_cache_write",
    QuantCacheWrite,
    factors="_ _ g _, _ _ g _, _ g _, _ g _, _ g _, _ g _, _ -> _ _ g _, _ _ g _, _ g _, _ g _",
    donates=((0, 0), (1, 1), (2, 2), (3, 3)),
)
static_cache_write = Primitive(
    "static_cache_write",
    StaticCacheWrite,
    factors="_ _ g _, _ _ g _, _ g _, _ g _, g _, g _, _ -> _ _ g _, _ _ g _",
    donates=((0, 0), (1, 1)),
)


@quant_cache_write.reference
def quant_cache_write_reference(args: QuantCacheWrite) -> tuple[Tensor, ...]:
    """Rounds each head of each token to int8 by its largest value, and writes integers and scales to the token's slot.

    Returns:
        The four pools with those slots replaced.
    """
    pools = tuple(pool.clone() for pool in args[:4])
    return _written(args._replace(k_cache=pools[0], v_cache=pools[1], k_scale=pools[2], v_scale=pools[3]))


@static_cache_write.reference
def static_cache_write_reference(args: StaticCacheWrite) -> tuple[Tensor, Tensor]:
    """Rounds each channel to int8 by its scale, and writes the integers to the token's slot.

    The reciprocal of the scale is in the dtype of k, as kernels take it (`_quantize_kv_to_int8` in attention/attention_v1.py of
    vllm-project/vllm-ascend, 182b75e).

    Returns:
        Both pools with those slots replaced.
    """
    k, v = (_by_channels(x, scale) for x, scale in ((args.k, args.k_scale), (args.v, args.v_scale)))
    return cache_write_reference(CacheWrite(args.k_cache, args.v_cache, k, v, args.slots))


@quant_cache_write.inplace
def _written(args: QuantCacheWrite) -> tuple[Tensor, ...]:
    slots, P = args.slots.long(), args.k_cache.shape[1]
    for pool, scales, x in ((args.k_cache, args.k_scale, args.k), (args.v_cache, args.v_scale, args.v)):
        rows, scale = quantise_rows(x)
        pool.view(-1, *x.shape[1:]).index_put_((slots,), rows)
        heads = torch.arange(x.shape[1], device=x.device)
        scales.index_put_((torch.div(slots, P, rounding_mode="floor")[:, None], heads[None], torch.remainder(slots, P)[:, None]), scale)
    return args[:4]


@static_cache_write.inplace
def _static_written(args: StaticCacheWrite) -> tuple[Tensor, Tensor]:
    for pool, scale, x in ((args.k_cache, args.k_scale, args.k), (args.v_cache, args.v_scale, args.v)):
        pool.view(-1, *x.shape[1:]).index_put_((args.slots.long(),), _by_channels(x, scale))
    return args.k_cache, args.v_cache


def _by_channels(x: Tensor, scale: Tensor) -> Tensor:
    return torch.round(x.float() * scale.reciprocal().to(x.dtype).float()).clamp(-128, 127).to(torch.int8)


@quant_cache_write.lowering("npu")
def _npu(args: QuantCacheWrite) -> tuple[Tensor, ...]:
    """Two rounding kernels, one write of both pools of integers, and a scatter for each pool of scales."""
    k_cache, v_cache, k_scale, v_scale, k, v, slots = args
    npu, (T, G, _), P = torch.ops.npu, k.shape, k_cache.shape[1]
    (k_rows, k_new), (v_rows, v_new) = npu.npu_dynamic_quant(k), npu.npu_dynamic_quant(v)
    k_out, v_out = npu.npu_scatter_pa_kv_cache_functional(k_rows, v_rows, k_cache, v_cache, slots, cache_mode="Norm")
    page, offset = slots // P, torch.remainder(slots, P)
    head = torch.arange(G, dtype=slots.dtype, device=slots.device)
    parts = [page[:, None].expand(T, G), head[None].expand(T, G), offset[:, None].expand(T, G)]
    places = torch.stack(parts, 2).view(T * G, 3)
    for pool, new in ((k_scale, k_new), (v_scale, v_new)):
        npu.npu_scatter_nd_update_(pool, places, new.reshape(T * G))
    return k_out, v_out, k_scale, v_scale


@static_cache_write.lowering("npu")
def _static_npu(args: StaticCacheWrite) -> Any:
    """A rounding kernel each; the reciprocals are of weights, and taken when these are loaded."""
    k_cache, v_cache, k, v, k_scale, v_scale, slots = args

    def rounded(x: Tensor, scale: Tensor) -> Tensor:
        flat = torch.ops.npu.npu_quantize(x.flatten(1), scale.reciprocal().to(x.dtype).flatten(), None, torch.int8, -1, False)
        return flat.view(x.shape)  # type: ignore[no-any-return]

    rows = rounded(k, k_scale), rounded(v, v_scale)
    return torch.ops.npu.npu_scatter_pa_kv_cache_functional(*rows, k_cache, v_cache, slots, cache_mode="Norm")


@quant_cache_write.cost
def _cost(args: QuantCacheWrite) -> Cost:
    heads = 2 * args.k.shape[0] * args.k.shape[1]
    return Cost(4 * args.k.numel(), nbytes(args.k, args.v, args.slots), 2 * args.k.numel() + 4 * heads)


@static_cache_write.cost
def _static_cost(args: StaticCacheWrite) -> Cost:
    return Cost(4 * args.k.numel(), nbytes(args.k, args.v, args.k_scale, args.v_scale, args.slots), 2 * args.k.numel())
