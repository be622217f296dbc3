"""Calls into operator packages, of functions that are no operator of torch, or whose operator does not say what it writes.

They run on an NPU alone. Each imports its package when it is called first; `packages.load` has imported it before.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch


def load_vllm_ascend() -> None:
    """Registers its operators (vllm_ascend/utils.py of vllm-project/vllm-ascend@182b75e, enable_custom_op)."""
    importlib.import_module("vllm_ascend.vllm_ascend_C")


def load_sgl_kernel_npu() -> None:
    """Registers its operators (python/sgl_kernel_npu/sgl_kernel_npu/__init__.py of sgl-project/sgl-kernel-npu@f425bdf)."""
    importlib.import_module("sgl_kernel_npu")


def gating_kernel() -> Any:
    """Finds the function that `fused_gdn_gating` calls."""
    return importlib.import_module("vllm_ascend.ops.triton.fused_gdn_gating").fused_gdn_gating_patch


def norm_kernel() -> Any:
    """Finds the function that `rms_norm_gated` calls."""
    return importlib.import_module("vllm_ascend.ops.triton.layernorm_gated").layer_norm_fwd_npu


def heads_kernel() -> Any:
    """Finds the function that `split_qkv_rmsnorm_rope` calls."""
    return importlib.import_module("vllm_ascend.ops.triton.linearnorm.split_qkv_rmsnorm_mrope").triton_split_qkv_rmsnorm_mrope


def split_kernel() -> Any:
    """Finds the kernel that `split_qkvzba` launches."""
    return importlib.import_module("vllm_ascend.ops.triton.fla.fused_qkvzba_split_reshape").fused_qkvzba_split_reshape_cat_kernel


def qk_norm_kernel() -> Any:
    """Finds the function that `split_qk_norm` calls."""
    return importlib.import_module("sgl_kernel_npu.norm.fused_split_qk_norm").fused_split_qk_norm


def vector_cores() -> int:
    """Vector cores of the current device, which the package's Triton functions ask for: its own worker does this when it starts.

    Source: vllm-project/vllm-ascend@182b75e vllm_ascend/ops/triton/triton_utils.py.
    """
    utils = importlib.import_module("vllm_ascend.ops.triton.triton_utils")
    utils.init_device_properties_triton()
    cores: int = utils.get_vectorcore_num()
    return cores


def causal_conv1d_update(
    x: torch.Tensor, weight: torch.Tensor, conv_state: torch.Tensor, cache_indices: torch.Tensor, num_accepted_tokens: torch.Tensor
) -> torch.Tensor:
    """`npu_causal_conv1d_custom` of vllm-ascend, whose schema says neither that it writes its output nor that it writes the states."""
    return torch.ops._C_ascend.npu_causal_conv1d_custom(  # type: ignore[no-any-return]
        torch.empty_like(x), x, weight, conv_state, None, None, cache_indices, None, num_accepted_tokens, 1, -1, 1
    )


def fused_gdn_gating(a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A Triton kernel of vllm-ascend; its results have a first dimension of 1."""
    vector_cores()
    g, beta = gating_kernel()(a_log, a, b, dt_bias)
    return g[0], beta[0]


def rms_norm_gated(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, eps: float) -> torch.Tensor:
    """A Triton kernel of vllm-ascend, norm before gate."""
    out: torch.Tensor = norm_kernel()(x, weight, None, eps, z=z, norm_before_gate=True, is_rms_norm=True)[0]
    return out


def dispatch_ffn_combine_w4a8(
    x: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    expert_idx: torch.Tensor,
    scale1: torch.Tensor,
    scale2: torch.Tensor,
    bias1: torch.Tensor,
    bias2: torch.Tensor,
    probs: torch.Tensor,
    group: str,
    ranks: int,
    max_output_size: int,
) -> torch.Tensor:
    """`dispatch_ffn_combine` of vllm-ascend, whose results do not say that they are operands; it finds the number of ranks by the group.

    A `swiglu_limit` of 0 clamps nothing. Without a mask of active tokens the kernel leaves `expert_idx` as it is.
    """
    out, counts = torch.empty_like(x), torch.empty(weight1.shape[0], dtype=torch.int32, device=x.device)
    lists = ([tensor] for tensor in (scale1, scale2, bias1, bias2))
    torch.ops._C_ascend.dispatch_ffn_combine(
        x, [weight1], [weight2], expert_idx, *lists, probs, group, max_output_size, out, counts, x_active_mask=None, swiglu_limit=0.0
    )
    return out


def split_qkv_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    q_heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Triton kernel of vllm-ascend; all angles are those of its first position axis."""
    vector_cores()
    rotated = cos_sin.shape[1]
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = heads_kernel()(
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        q_heads,
        kv_heads,
        q_weight.shape[0],
        eps,
        [rotated // 2, 0, 0],
        False,
        rope_dim=rotated,
        has_gate=True,
    )
    return out


def split_qkvzba(
    x: torch.Tensor, key_width: int, value_width: int, value_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Triton kernel of vllm-ascend, whose function takes two projections; their rows may as well lie in one, as far apart as its rows.

    Launched as that function does for one key head a row (vllm_ascend/ops/triton/fla/fused_qkvzba_split_reshape.py at 182b75e).
    """
    rows, width = x.shape
    values = value_heads * value_width
    widths = (2 * key_width + values, values, value_heads, value_heads)
    qkv, z, b, a = (torch.empty(rows, part, dtype=x.dtype, device=x.device) for part in widths)
    cores = max(1, min(vector_cores(), rows))
    a_core = -(-rows // cores)
    # Its unified buffer holds 85 KiB of rows, read and written.
    at_once = 1 << (max(1, 85 * 1024 // x.element_size() // (2 * width)) - 1).bit_length()
    split_kernel()[(cores, 1)](
        qkv,
        z,
        b,
        a,
        x,
        x[:, width - 2 * value_heads :],
        1,
        value_heads,
        key_width,
        value_width,
        rows,
        a_core,
        width,
        width,
        widths[0],
        widths[1],
        widths[2],
        min(at_once, a_core, 64),
    )
    return qkv, z, b, a


def split_qk_norm(
    x: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A Triton kernel of sgl-kernel-npu, which takes weights as the norms of latent attention and puts a dimension into two results."""
    q_norm, k_norm = SimpleNamespace(weight=q_weight), SimpleNamespace(weight=k_weight)
    widths = len(q_weight), len(k_weight), x.shape[1] - len(q_weight) - len(k_weight)
    q, k, rest = qk_norm_kernel()(x, q_norm, k_norm, *widths, eps)
    return q, k.squeeze(1), rest.squeeze(1)
