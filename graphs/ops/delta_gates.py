"""The two gates of a gated DeltaNet layer, from its projections: log decay of the state, and how much of a token is written."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class DeltaGates(NamedTuple):
    """Operands of `delta_gates`."""

    a: Tensor  # [B, Q, H]
    b: Tensor  # [B, Q, H]
    a_log: Tensor  # [H] f32
    dt_bias: Tensor  # [H] f32


delta_gates = Primitive("delta_gates", DeltaGates, factors="_ _ h, _ _ h, h, h -> _ _ h, _ _ h")


@delta_gates.abstract
def _abstract(args: DeltaGates) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args.a, dtype=torch.float32), torch.empty_like(args.b)


@delta_gates.reference
def delta_gates_reference(args: DeltaGates) -> tuple[Tensor, Tensor]:
    """`-exp(a_log) * softplus(a + dt_bias)` in f32, and sigmoid(b) (arXiv:2412.06464).

    Returns:
        log decay [B, Q, H] f32, at most 0, and beta [B, Q, H] in the dtype of b.
    """
    return -args.a_log.exp() * torch.nn.functional.softplus(args.a.float() + args.dt_bias), torch.sigmoid(args.b)


delta_gates.lowering("npu")(delta_gates_reference)


@delta_gates.lowering("npu", needs=("aclgraph", "vllm-ascend"))
def delta_gates_vllm(args: DeltaGates) -> Any:
    """A Triton kernel of vllm-ascend, which reads rows one behind the other."""
    a, b, a_log, dt_bias = args
    g, beta = torch.ops.npucompile_packages.fused_gdn_gating(a_log, a.flatten(0, 1).contiguous(), b.flatten(0, 1).contiguous(), dt_bias)
    return g.view(a.shape), beta.view(b.shape)


@delta_gates.cost
def _cost(args: DeltaGates) -> Cost:
    return Cost(6 * args.a.numel() + 4 * args.b.numel(), nbytes(*args), 4 * args.a.numel() + nbytes(args.b))
