"""CPU kernels of the operators that npucompile registers for functions of operator packages (packages.py)."""

from __future__ import annotations

import torch

from ....graphs.errors import LoweringError
from .kernels_common import FLOATS, INDICES, require, require_shape

CHANNELS, TAPS = 16, 4
"""Multiples of channels, and taps with accepted tokens, that the convolution takes."""


def causal_conv1d_update(
    x: torch.Tensor, weight: torch.Tensor, conv_state: torch.Tensor, cache_indices: torch.Tensor, num_accepted_tokens: torch.Tensor
) -> torch.Tensor:
    """Depthwise causal convolution of a few tokens a sequence, then silu; writes the states.

    Source: vllm-project/vllm-ascend@182b75e csrc/moe/causal_conv1d, op_host/causal_conv1d_tiling_validation.h and
    op_kernel/causal_conv1d.h (InitRing, WriteBackStateSpec).

    Args:
        x: [B, Q, C], C a multiple of 16.
        weight: [4, C].
        conv_state: [S, N, C], N at least 3 + Q-1: inputs of a sequence, of which those that it starts from begin at row accepted - 1; then
            all but the oldest of these, and those of x.
        cache_indices: [B] slot of each sequence.
        num_accepted_tokens: [B], from 1; those beyond what a slot has room for count as the most.
    """
    op = "causal_conv1d_update"
    (B, Q, C), (taps, _) = require(op, "x", x, FLOATS, (3,)).shape, require(op, "weight", weight, (x.dtype,), (2,)).shape
    require_shape(op, "weight", weight, (TAPS, C))
    N = require(op, "conv_state", conv_state, (x.dtype,), (3,)).shape[1]
    require_shape(op, "conv_state", conv_state, (conv_state.shape[0], N, C))
    slots = require(op, "cache_indices", cache_indices, INDICES, (1,)).tolist()
    accepted = require(op, "num_accepted_tokens", num_accepted_tokens, INDICES, (1,)).tolist()
    if (
        C % CHANNELS
        or taps - 1 + Q - 1 > N
        or not len(slots) == len(accepted) == B
        or not all(0 <= slot < len(conv_state) for slot in slots)
    ):
        raise LoweringError(
            f"{op}: {C} channels, {Q} tokens, {N} inputs a slot, slots {slots} of {len(conv_state)}; legal are multiples of {CHANNELS}, "
            f"at least {taps - 1 + Q - 1} inputs, and one slot for each of {B} sequences"
        )
    out, before = torch.empty_like(x), conv_state.clone()
    for b, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
        first = min(max(count - 1, 0), N - (taps - 1))
        inputs = torch.cat([before[slot, first : first + taps - 1], x[b]])
        total = (inputs.unfold(0, taps, 1).float() * weight.float().t()).sum(-1)
        out[b] = torch.nn.functional.silu(total).to(x.dtype)
        conv_state[slot, : taps - 2 + Q] = inputs[1:]
    return out


def fused_gdn_gating(a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`-exp(a_log) * softplus(a + dt_bias)` [T, H] f32, softplus(x) = x above 20; sigmoid(b) [T, H] in the dtype of b.

    Source: vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/fused_gdn_gating.py.

    Args:
        a_log, dt_bias: [H].
        a, b: [T, H], rows one behind the other: the kernel reads no strides.
    """
    op = "fused_gdn_gating"
    for name, value in (("a", a), ("b", b)):
        require_shape(op, name, require(op, name, value, FLOATS, (2,)), (a.shape[0], len(a_log)))
        if not value.is_contiguous():
            raise LoweringError(f"{op}: {name} has strides {value.stride()}; legal are {(value.shape[1], 1)}")
    x = a.float() + dt_bias.float()
    softplus = torch.where(x <= 20.0, torch.log(1 + x.clamp(max=20.0).exp()), x)
    return -a_log.float().exp() * softplus, torch.sigmoid(b.float()).to(b.dtype)


def rms_norm_gated(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(x) * weight * silu(z)` in f32, in the dtype of x.

    Source: vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/layernorm_gated.py (layer_norm_fwd_npu).

    Args:
        x, z: [T, D]; the rows of either may lie apart, their values may not.
        weight: [D].
    """
    op = "rms_norm_gated"
    T, D = require(op, "x", x, FLOATS, (2,)).shape
    require_shape(op, "z", require(op, "z", z, FLOATS, (2,)), (T, D))
    require_shape(op, "weight", require(op, "weight", weight, FLOATS, (1,)), (D,))
    if strides := [value.stride() for value in (x, z) if D > 1 and value.stride(1) != 1]:
        raise LoweringError(f"{op}: rows have strides {strides}; legal are values one behind the other")
    wide, gate = x.float(), z.float()
    unit = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (unit * torch.nn.functional.silu(gate)).to(x.dtype)
