"""Turns a projection into the log decay of a gated DeltaNet layer."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes

delta_decay = Primitive("delta_decay", "(Tensor a, Tensor a_log, Tensor dt_bias) -> Tensor", factors="_ _ h, h, h -> _ _ h")


@delta_decay.abstract
def _abstract(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a, dtype=torch.float32)


@delta_decay.reference
def delta_decay_reference(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """`-exp(a_log) * softplus(a + dt_bias)` in f32 (arXiv:2412.06464).

    Args:
        a: [B, Q, H].
        a_log, dt_bias: [H] f32.

    Returns:
        [B, Q, H] f32, at most 0.
    """
    return -a_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)


@delta_decay.lowering("ge")
def _npu(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> Any:
    """No softplus there: `log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)`."""
    x = a.float() + dt_bias
    return -a_log.exp() * (x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs())))


@delta_decay.cost
def _cost(a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> Cost:
    return Cost(6 * a.numel(), nbytes(a, a_log, dt_bias), 4 * a.numel())
