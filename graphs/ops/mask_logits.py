"""Masks of a vocabulary: which tokens a request's output may continue with."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..types import WORD_BITS


class MaskLogits(NamedTuple):
    """Operands of `mask_logits`."""

    logits: Tensor  # [B, Q, V] f32
    bitmask: Tensor  # [C, Q, ceil(V / 32)] int32; bit i of word w allows token 32 w + i
    bitmask_rows: Tensor  # [B] int32; 0 leaves a row as it is, c masks it with bitmask[c - 1]


mask_logits = Primitive("mask_logits", MaskLogits, factors="b q _, _ q _, b -> b q _", like="logits")


@mask_logits.reference
def mask_logits_reference(args: MaskLogits) -> Tensor:
    """The lowest finite number where a row's mask has a zero: no temperature makes it NaN, and no weight is left of it.

    Returns:
        [B, Q, V] f32.
    """
    words = _words(args)
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    return _masked(args, ((words[..., None] >> places) & 1) != 0)


mask_logits.lowering("inductor")(mask_logits_reference)


@mask_logits.lowering("npu")
def _npu(args: MaskLogits) -> Tensor:
    """By powers of two: torchair converts no shift. The highest bit is the sign of a word. The powers read constants alone."""
    return _masked(args, (_words(args)[..., None] & bit_powers(args.logits.device)) != 0)


def bit_powers(device: torch.device) -> Tensor:
    """The word that has each bit alone: [32] int32."""
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=device)
    powers = torch.where(places < WORD_BITS - 1, torch.pow(2, places.clamp(max=WORD_BITS - 2)), -(2 ** (WORD_BITS - 1)))
    return powers.to(torch.int32)


def _words(args: MaskLogits) -> Tensor:
    """The mask of each row, [B, Q, W] int32; of a row without one, any."""
    return args.bitmask.index_select(0, (args.bitmask_rows - 1).clamp(min=0))


def _masked(args: MaskLogits, bits: Tensor) -> Tensor:
    """The logits where the bits [B, Q, W, 32] are set, and all of a row without a mask."""
    logits, _, bitmask_rows = args
    allowed = bits.flatten(-2)[..., : logits.shape[-1]] | (bitmask_rows == 0)[:, None, None]
    return torch.where(allowed, logits, torch.finfo(logits.dtype).min)


@mask_logits.cost
def _cost(args: MaskLogits) -> Cost:
    return Cost(3 * args.logits.numel(), nbytes(*args), nbytes(args.logits))
