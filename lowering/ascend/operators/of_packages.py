"""Operators that npucompile registers for functions of operator packages (packages.py)."""

from __future__ import annotations

import torch

from ....graphs.errors import LoweringError
from ..packages import NAMESPACE, split_widths
from .checks import FLOATS, INDICES, require, require_shape
from .node import LegalityRule
from .record import Kernel, NpuOperator, TorchForm
from .state_rules import convolution_states

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


def split_qkv_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys after RMS norm in f32 and rotation of their first R channels; values; gates; each [T, heads * D].

    Source: vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/linearnorm/split_qkv_rmsnorm_mrope.py.

    Args:
        qkv: [T, (2 q_heads + 2 kv_heads) D], rows one behind the other: of each query head its query and its gate; keys; values.
        q_weight, k_weight: [D].
        cos_sin: [T, R], the cosines of R/2 angles and then their sines; channel i turns with i + R/2.
        q_heads, kv_heads: the kernel reads ranges, so these, D and R are powers of two.
    """
    op = "split_qkv_rmsnorm_rope"
    T, D = require(op, "qkv", qkv, FLOATS, (2,)).shape[0], require(op, "q_weight", q_weight, FLOATS, (1,)).shape[0]
    require_shape(op, "qkv", qkv, (T, 2 * (q_heads + kv_heads) * D))
    require_shape(op, "k_weight", require(op, "k_weight", k_weight, FLOATS, (1,)), (D,))
    R = require(op, "cos_sin", cos_sin, FLOATS, (2,)).shape[1]
    require_shape(op, "cos_sin", cos_sin, (T, R))
    _require_rows(op, qkv=qkv, cos_sin=cos_sin)
    _require_powers(op, q_heads=q_heads, kv_heads=kv_heads, D=D, R=R)
    if D < R:
        raise LoweringError(f"{op}: {R} channels of a head turn, and a head has {D}; legal are at most {D}")
    pairs, k, v = qkv.split([2 * q_heads * D, kv_heads * D, kv_heads * D], 1)
    q, gate = pairs.view(T, q_heads, 2, D).unbind(2)
    cos, sin = (half[:, None] for half in cos_sin.float().split(R // 2, 1))

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        unit = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        low, high, rest = unit.split([R // 2, R // 2, D - R], -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1).to(qkv.dtype).flatten(1)

    return turned(q, q_weight), turned(k.view(T, kv_heads, D), k_weight), v.clone(), gate.flatten(1).clone()


def split_qkvzba(
    x: torch.Tensor, key_width: int, value_width: int, value_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of [rows, q k v], [rows, z], [rows, b] and [rows, a].

    Source: vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/fla/fused_qkvzba_split_reshape.py.

    Args:
        x: [rows, 2 key_width + 2 value_heads value_width + 2 value_heads], one behind the other.
        key_width, value_width, value_heads: the kernel reads ranges, so these are powers of two.
    """
    op, widths = "split_qkvzba", split_widths(key_width, value_width, value_heads)
    require_shape(op, "x", require(op, "x", x, FLOATS, (2,)), (x.shape[0], sum(widths)))
    _require_rows(op, x=x)
    _require_powers(op, key_width=key_width, value_width=value_width, value_heads=value_heads)
    qkv, z, b, a = (part.clone() for part in x.split(widths, 1))
    return qkv, z, b, a


def split_qk_norm(
    x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norms of the first channels of each row and of those behind them, in f32; copies of the rest.

    Source: sgl-project/sgl-kernel-npu@f425bdf python/sgl_kernel_npu/sgl_kernel_npu/norm/fused_split_qk_norm.py.

    Args:
        x: [rows, N], one behind the other, at most 65535: each is a program of the kernel, and CANN starts no more.
        q_weight, k_weight: [Dq] and [Dk]; they and N - Dq - Dk are at least 1, and powers of two, of which the kernel reads ranges.
        eps: added to the means of squares.
    """
    op, q_width, k_width = "split_qk_norm", len(q_weight), len(k_weight)
    rows, width = require(op, "x", x, FLOATS, (2,)).shape
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        require(op, name, weight, FLOATS, (1,))
    _require_rows(op, x=x)
    _require_powers(op, q_width=q_width, k_width=k_width, rest=width - q_width - k_width)
    if rows > 65535:
        raise LoweringError(f"{op}: x has {rows} rows; legal are at most 65535")
    q, k, rest = x.split([q_width, k_width, width - q_width - k_width], 1)
    q, k = (
        (part.float() * torch.rsqrt(part.float().pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
        for part, weight in ((q, q_weight), (k, k_weight))
    )
    return q, k, rest.clone()


def _require_rows(op: str, **tensors: torch.Tensor) -> None:
    """Refuses rows that do not lie one behind the other."""
    if strided := {name: value.stride() for name, value in tensors.items() if not value.is_contiguous()}:
        raise LoweringError(f"{op}: strides are {strided}; legal are rows one behind the other")


def _require_powers(op: str, **sizes: int) -> None:
    """Refuses sizes that are no powers of two."""
    if odd := {name: size for name, size in sizes.items() if size < 1 or size & (size - 1)}:
        raise LoweringError(f"{op}: sizes are {odd}; legal are powers of two")


def _of_package(kernel: Kernel, *rules: LegalityRule) -> NpuOperator:
    return NpuOperator(torch=(TorchForm(f"{NAMESPACE}.{kernel.__name__}.default", kernel),), rules=rules)


OPERATORS = (
    _of_package(causal_conv1d_update, convolution_states),
    *(_of_package(kernel) for kernel in (fused_gdn_gating, rms_norm_gated, split_qkv_rmsnorm_rope, split_qkvzba, split_qk_norm)),
)
