"""Rows of int8 latents as the NPU's sparse attention reads them: integers, the rotary part, and a scale of each tile, byte behind byte."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows
from ..types import DTYPE_NAMES, DTYPES

TILE = 128
"""Channels that share a scale (npu_kv_quant_sparse_flash_attention of Ascend/op-plugin, 517f2e7)."""


def tile_of(channels: int) -> int:
    """Channels that share a scale: TILE, or all where they are no whole tiles."""
    return channels if channels % TILE else TILE


def packed_width(channels: int, rotary: int, dtype: torch.dtype) -> int:
    """Bytes of a token: its integers, its rotary part in `dtype`, and f32 scales."""
    return channels + rotary * dtype.itemsize + 4 * (channels // tile_of(channels))


_AXIS = "packed"


def packed_axis(channels: int, dtype: torch.dtype) -> str:
    """The logical axis of the bytes of a token, which says what they are to whoever compares pools; no layout splits it."""
    return f"{_AXIS} {channels} {DTYPE_NAMES[dtype]}"


def parts_of(axis: str | None) -> tuple[int, torch.dtype] | None:
    """Channels of a latent, and dtype of rotary parts, where an axis is one of packed bytes."""
    kind, *parts = axis.split() if axis else [""]
    return (int(parts[0]), DTYPES[parts[1]]) if kind == _AXIS else None


def packed(latent: Tensor, rotary: Tensor) -> Tensor:
    """Rows [..., W] int8 of latents [..., L] and rotary parts [..., R]."""
    rows, scale = quantise_rows(latent.unflatten(-1, (-1, tile_of(latent.shape[-1]))))
    return joined(rows.flatten(-2), rotary, scale)


def joined(integers: Tensor, rotary: Tensor, scale: Tensor) -> Tensor:
    """The same of what was rounded before."""
    return torch.cat([integers, rotary.contiguous().view(torch.int8), scale.contiguous().view(torch.int8)], -1)


def with_rotary_in(rows: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Rows whose rotary parts are float32, with these in another dtype."""
    scales = 4 * (channels // tile_of(channels))
    integers, rotary, scale = rows.split([channels, rows.shape[-1] - channels - scales, scales], -1)
    return torch.cat([integers, rotary.contiguous().view(torch.float32).to(dtype).view(torch.int8), scale], -1)


def unpacked(rows: Tensor, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Latents [..., channels], integers times their scales and rounded once, and rotary parts, both in `dtype`.

    Args:
        rows: [..., W] int8.
    """
    scales = 4 * (channels // tile_of(channels))
    integers, rotary, scale = rows.split([channels, rows.shape[-1] - channels - scales, scales], -1)
    factors = scale.contiguous().view(torch.float32).unsqueeze(-1)
    latents = (integers.unflatten(-1, (-1, tile_of(channels))).float() * factors).flatten(-2)
    return latents.to(dtype), rotary.contiguous().view(dtype)


class PackedLatentWrite(NamedTuple):
    """Operands of `packed_latent_write`."""

    cache: Tensor  # [pages, P, 1, W] int8 pool
    latent: Tensor  # [T, 1, L]
    rotary: Tensor  # [T, 1, R]
    slots: Tensor  # as of `paged_write`


packed_latent_write = Primitive("packed_latent_write", PackedLatentWrite, factors="_ _ _ _, _ _ _, _ _ _, _ -> _ _ _ _", donates=((0, 0),))


@packed_latent_write.reference
def packed_latent_write_reference(args: PackedLatentWrite) -> Tensor:
    """Rounds each tile of a latent to int8 by its largest value, and writes it with its rotary part and its scales to the token's slot.

    Returns:
        The pool with those slots replaced.
    """
    cache, latent, rotary, slots = args
    return cache.flatten(0, 1).index_put((slots.long(),), packed(latent, rotary)).view(cache.shape)


@packed_latent_write.inplace
def _inplace(args: PackedLatentWrite) -> tuple[Tensor]:
    cache, latent, rotary, slots = args
    cache.view(-1, *cache.shape[2:]).index_put_((slots.long(),), packed(latent, rotary))
    return (cache,)


@packed_latent_write.lowering("npu")
def _npu(args: PackedLatentWrite) -> Tensor:
    """A rounding kernel over tiles, one row of bytes of the three parts, and a scatter in place."""
    cache, latent, rotary, slots = args
    (T, _, L), P = latent.shape, cache.shape[1]
    rows, scale = torch.ops.npu.npu_dynamic_quant(latent.reshape(-1, tile_of(L)))
    row = joined(rows.view(T, 1, L), rotary, scale.view(T, 1, -1))
    places = torch.stack([slots // P, slots % P], 1)
    torch.ops.npu.npu_scatter_nd_update_(cache, places, row)
    return cache


@packed_latent_write.cost
def _cost(args: PackedLatentWrite) -> Cost:
    return Cost(2 * args.latent.numel(), nbytes(args.latent, args.rotary, args.slots), args.latent.shape[0] * args.cache.shape[-1])
