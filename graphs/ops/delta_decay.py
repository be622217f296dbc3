"""Log decay of a gated DeltaNet layer, from its projection."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class DeltaDecay(NamedTuple):
    """Operands of `delta_decay`."""

    a: Tensor  # [B, Q, H]
    a_log: Tensor  # [H] f32
    dt_bias: Tensor  # [H] f32


delta_decay = Primitive("delta_decay", DeltaDecay, factors="_ _ h, h, h -> _ _ h")


@delta_decay.abstract
def _abstract(args: DeltaDecay) -> Tensor:
    return torch.empty_like(args.a, dtype=torch.float32)


@delta_decay.reference
def delta_decay_reference(args: DeltaDecay) -> Tensor:
    """`-exp(a_log) * softplus(a + dt_bias)` in f32 (arXiv:2412.06464).

    Returns:
        [B, Q, H] f32, at most 0.
    """
    return -args.a_log.exp() * torch.nn.functional.softplus(args.a.float() + args.dt_bias)


@delta_decay.lowering("npu")
def _npu(args: DeltaDecay) -> Any:
    return -args.a_log.exp() * torch.nn.functional.softplus(args.a.float() + args.dt_bias)


@delta_decay.cost
def _cost(args: DeltaDecay) -> Cost:
    return Cost(6 * args.a.numel(), nbytes(*args), 4 * args.a.numel())
