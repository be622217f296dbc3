"""Calls into operator packages, of functions that are no operator of torch, or whose operator does not say what it writes.

They run on an NPU alone. Each imports its package when it is called first; `packages.load` has imported it before.
"""

from __future__ import annotations

import importlib
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


def causal_conv1d_update(
    x: torch.Tensor, weight: torch.Tensor, conv_state: torch.Tensor, cache_indices: torch.Tensor, num_accepted_tokens: torch.Tensor
) -> torch.Tensor:
    """`npu_causal_conv1d_custom` of vllm-ascend, whose schema says neither that it writes its output nor that it writes the states."""
    return torch.ops._C_ascend.npu_causal_conv1d_custom(  # type: ignore[no-any-return]
        torch.empty_like(x), x, weight, conv_state, None, None, cache_indices, None, num_accepted_tokens, 1, -1, 1
    )


def fused_gdn_gating(a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A Triton kernel of vllm-ascend; its results have a first dimension of 1."""
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
