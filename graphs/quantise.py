"""Quantisation of activations and weights to int8 and int4, and unpacking of int4."""

import torch

from .errors import CheckpointError

INT8_MAX = 127
INT4_MAX = 7
_BLOCK = 8
NIBBLES = 8
"""int4 values in one int32."""


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds each row to int8 by its own scale, `amax / 127`, half to even; a row of zeros has scale 0.

    Args:
        x: [..., K].

    Returns:
        [..., K] int8 and the scales [...] f32: `x` is about `rows * scale[..., None]`.
    """
    wide = x.float()
    scale = wide.abs().amax(-1) / INT8_MAX
    divisor = torch.where(scale > 0, scale, 1.0)
    return torch.round(wide / divisor[..., None]).to(torch.int8), scale


def rounded_in_blocks(x: torch.Tensor) -> torch.Tensor:
    """What arrives of rows that travel as int8: each eight values, 32 bytes of float32, have a scale of x's dtype.

    As a combine with `comm_quant_mode` 2 rounds on an Atlas A3; the integers pass through float16.

    Args:
        x: [..., K].
    """
    K = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -K % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / INT8_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    rounded = torch.round((blocks / scale).half()).float() * scale.to(x.dtype).float()
    return rounded.to(x.dtype).flatten(-2)[..., :K]


def quantise_w8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a weight to int8, one scale an output channel.

    Args:
        weight: [..., K, N], contraction first; the caller transposes a checkpoint's [N, K].

    Returns:
        [..., K, N] int8 and the scales [..., N] f32.
    """
    values, scale = _symmetric(weight, INT8_MAX)
    return values.to(torch.int8), scale


def quantise_w4(weight: torch.Tensor, group: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds a weight to int4.

    Args:
        weight: [..., K, N], contraction first, N a multiple of 8.
        group: weights of an output channel that share a scale, a divisor of K; 0: all.

    Returns:
        the packed weight as `pack_w4` gives it, `scale_bits` of the scales, and their `assist_w4`.

    Raises:
        CheckpointError: N is not a multiple of 8.
    """
    values, scale = quantise_w4_values(weight, group)
    return pack_w4(values), scale_bits(scale), assist_w4(values, scale)


def quantise_w4_values(weight: torch.Tensor, group: int = 0, held: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantise_w4`: the values [..., K, N] int8 in [-8, 7], and the scales [..., groups, N] f32.

    Args:
        held: a dtype that holds the scales exactly; by default float16 where they are of groups, else float32.
    """
    K = weight.shape[-2]
    held = held or (torch.float16 if group else torch.float32)
    values, scale = _symmetric(weight.unflatten(-2, (-1, group or K)), INT4_MAX, held)
    return values.flatten(-3, -2).to(torch.int8), scale


def _symmetric(weight: torch.Tensor, largest: int, held: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Values as f32, and scales f32 that the dtype `held` holds exactly: values are rounded by what kernels multiply by."""
    wide = weight.float()
    scale = (wide.abs().amax(-2) / largest).clamp(min=torch.finfo(torch.float32).eps).to(held).float()
    # In place: a third tensor of this size would be the peak of what loading a weight needs.
    return torch.div(wide, scale[..., None, :]).round_().clamp_(-largest - 1, largest), scale


def pack_w4(values: torch.Tensor) -> torch.Tensor:
    """Packs 8 neighbouring output channels into one int32, the first in the lowest bits.

    Args:
        values: [..., K, N] int8 in [-8, 7], N a multiple of 8.

    Returns:
        [..., K, N / 8] int32.

    Raises:
        CheckpointError: N is not a multiple of 8.
    """
    if values.shape[-1] % NIBBLES:
        raise CheckpointError(f"int4 weight {list(values.shape)}: {values.shape[-1]} output channels; {NIBBLES} share one int32")
    nibbles = (values.to(torch.int64) & 0xF).view(*values.shape[:-1], -1, NIBBLES)
    return (nibbles << _shifts(values)).sum(-1).to(torch.int32)


def unpack_w4(packed: torch.Tensor) -> torch.Tensor:
    """The [..., K, N] int8 values of an int32 [..., K, N / 8]."""
    nibbles = (packed[..., None] >> _shifts(packed)) & 0xF
    return ((nibbles ^ 8) - 8).flatten(-2).to(torch.int8)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=like.device)


def unpack_rows(packed: torch.Tensor, axis: int) -> torch.Tensor:
    """The int8 values in [-8, 7] of bytes that hold two neighbours along `axis`, the first in the low four bits (ModelSlim 26.1.0)."""
    low, high = (packed << 4) >> 4, packed >> 4
    values: torch.Tensor = torch.stack([low, high], axis + 1).flatten(axis, axis + 1)
    return values


def pack_rows(values: torch.Tensor, axis: int) -> torch.Tensor:
    """The inverse of `unpack_rows`."""
    low, high = values.unflatten(axis, (-1, 2)).unbind(axis + 1)
    packed: torch.Tensor = (low & 0xF) | (high << 4)
    return packed


def unpack_columns(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The int8 values in [-8, 7] of int32 words [..., words] that hold eight neighbours plus 8, the first in the lowest bits.

    Args:
        width: of the values, where a slice has all of its words: the last ones may be filled with zeros.
    """
    nibbles = (packed[..., None] >> _shifts(packed)) & 0xF
    values: torch.Tensor = (nibbles - 8).flatten(-2).to(torch.int8)
    return values[..., :width]


def pack_columns(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_columns`, where the last word is filled with zeros."""
    missing = -values.shape[-1] % NIBBLES
    nibbles = torch.nn.functional.pad(values.to(torch.int64) + 8, (0, missing)).unflatten(-1, (-1, NIBBLES))
    words: torch.Tensor = (nibbles << _shifts(values)).sum(-1).to(torch.int32)
    return words


def grouped_scale(scale: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The scale of each group: the channel's [..., 1, N] times the group's own [..., groups, N], rounded to what int4 kernels hold.

    They read float16 (torch_npu's grouped product with scales of groups; process_weights of vllm-ascend's W4A8 method, 99aedaf).
    """
    combined: torch.Tensor = (scale * second).to(torch.float16).float()
    return combined


def scale_bits(scale: torch.Tensor) -> torch.Tensor:
    """Scales as int4 kernels read them: f32 becomes int64, the 32 bits with zeros above."""
    return scale.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def bits_scale(bits: torch.Tensor) -> torch.Tensor:
    """The f32 scales of `scale_bits`."""
    # Scales are positive, so the sign bit that int32 would misread is never set.
    return bits.to(torch.int32).view(torch.float32)


def assist_w4(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The correction that int4 kernels add: they multiply `x // 16` and `x % 16 - 8` of an int8 x, which loses 8 times every weight.

    Args:
        values: [..., K, N] int8 in [-8, 7].
        scale: [..., groups, N] f32, groups a divisor of K.

    Returns:
        [..., N] f32, `8 * sum_k values * scale`.
    """
    sums = values.unflatten(-2, (scale.shape[-2], -1)).float().sum(-2)
    total: torch.Tensor = (sums * scale.float()).sum(-2)
    return 8 * total
