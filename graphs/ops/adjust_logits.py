"""Adjusted logits: what a request adds to tokens, and how much less likely it makes those that it has had."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..types import WORD_BITS
from .mask_logits import bit_powers


class AdjustLogits(NamedTuple):
    """Operands of `adjust_logits`. Rows are named by numbers from 1; 0 is none."""

    logits: Tensor  # [B, Q, V] f32
    adjustments: Tensor  # [A, Q, V] f32
    bias_rows: Tensor  # [B] int32; which adjustment is added before the repetition penalty
    penalty_rows: Tensor  # [B] int32; which one is added after it
    seen: Tensor  # [A, Q, ceil(V / 32)] int32; bit i of word w says that token 32 w + i was there
    seen_rows: Tensor  # [B] int32; of a row with 0 the repetition penalty is 1
    repetition_penalty: Tensor  # [B] f32, above 0


adjust_logits = Primitive("adjust_logits", AdjustLogits, factors="b q _, _ q _, b, b, _ q _, b, b -> b q _", like="logits")


@adjust_logits.reference
def adjust_logits_reference(args: AdjustLogits) -> Tensor:
    """Bias, then repetition penalty, then presence and frequency penalties, all on raw logits, as vLLM has them.

    `Sampler.apply_logits_processors` and `apply_penalties` (vllm/v1/sample/sampler.py, vllm/model_executor/layers/utils.py): biases are
    added; positive logits of tokens in prompt or output are divided by the repetition penalty and others multiplied
    (arXiv:1909.05858; `RepetitionPenaltyLogitsProcessor` of transformers); the output's penalties are subtracted. Temperature comes after.

    Returns:
        [B, Q, V] f32.
    """
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=args.logits.device)
    return _adjusted(args, ((_seen(args)[..., None] >> places) & 1) != 0)


adjust_logits.lowering("inductor")(adjust_logits_reference)


@adjust_logits.lowering("npu")
def _npu(args: AdjustLogits) -> Tensor:
    """As `mask_logits` finds bits."""
    return _adjusted(args, (_seen(args)[..., None] & bit_powers(args.logits.device)) != 0)


def _seen(args: AdjustLogits) -> Tensor:
    """The tokens seen of each row, [B, Q, W] int32; of a row with 0, any."""
    return args.seen.index_select(0, (args.seen_rows - 1).clamp(min=0))


def _adjusted(args: AdjustLogits, bits: Tensor) -> Tensor:
    logits, adjustments, bias_rows, penalty_rows, _, _, repetition_penalty = args
    logits = logits + _added(adjustments, bias_rows)
    factor = torch.where(bits.flatten(-2)[..., : logits.shape[-1]], repetition_penalty[:, None, None], 1.0)
    return (torch.where(logits > 0, logits / factor, logits * factor) + _added(adjustments, penalty_rows)).contiguous()


def _added(adjustments: Tensor, rows: Tensor) -> Tensor:
    """The adjustment of each row, [B, Q, V] f32; zeros for a row without. What no row names need not be a number."""
    chosen = adjustments.index_select(0, (rows - 1).clamp(min=0))
    return torch.where((rows > 0)[:, None, None], chosen, 0.0)


@adjust_logits.cost
def _cost(args: AdjustLogits) -> Cost:
    return Cost(8 * args.logits.numel(), nbytes(*args), nbytes(args.logits))
