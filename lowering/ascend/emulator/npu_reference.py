"""The CPU kernels of NPU operators and collectives, by name of the operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....graphs.errors import LoweringError
from ..acl_graph.file import GROUP_ARGUMENTS
from ..packages import NAMESPACE
from . import kernels_attention as attention
from . import kernels_dense as dense
from . import kernels_fused_experts as fused_experts
from . import kernels_gating as gating
from . import kernels_group as group
from . import kernels_in_place as in_place
from . import kernels_moe as moe
from . import kernels_packages as of_packages
from . import kernels_sparse as sparse
from . import kernels_state as state
from .kernels_group import Arguments


def _named(namespace: str, *kernels: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {f"{namespace}.{kernel.__name__}.default": kernel for kernel in kernels}


KERNELS: Mapping[str, Callable[..., Any]] = {
    **_named(
        "npu",
        dense.npu_rms_norm,
        dense.npu_add_rms_norm,
        dense.npu_add_rms_norm_dynamic_quant,
        dense.npu_swiglu,
        dense.npu_rotary_mul,
        dense.npu_linear,
        dense.npu_dynamic_quant,
        dense.npu_quant_matmul,
        dense.npu_quantize,
        dense.npu_weight_quant_batchmatmul,
        state.npu_scatter_pa_kv_cache_functional,
        state.npu_scatter_nd_update,
        state.npu_scatter_nd_update_,
        state.npu_recurrent_gated_delta_rule_functional,
        state.npu_chunk_gated_delta_rule,
        gating.npu_moe_gating_top_k,
        gating.npu_moe_gating_top_k_softmax_v2,
        moe.npu_moe_init_routing_v2,
        moe.npu_grouped_matmul,
        moe.npu_grouped_matmul_swiglu_quant_v2,
        moe.npu_dequant_swiglu_quant,
        moe.npu_moe_finalize_routing,
        sparse.npu_lightning_indexer,
        sparse.npu_sparse_flash_attention,
        in_place.npu_scatter_pa_kv_cache,
        in_place.npu_recurrent_gated_delta_rule,
        in_place.npu_fused_infer_attention_score,
    ),
    **_named("aten", dense.mm, dense.bmm),
    **_named("air", attention.npu_fused_infer_attention_score),
    **_named("_C_ascend", state.npu_recurrent_gated_delta_rule),
    **_named(
        NAMESPACE,
        of_packages.causal_conv1d_update,
        of_packages.fused_gdn_gating,
        of_packages.rms_norm_gated,
        of_packages.split_qkv_rmsnorm_rope,
        of_packages.split_qkvzba,
        of_packages.split_qk_norm,
    ),
}
"""Kernels of one rank by the name of the operator overload; called with the arguments of its node.

They take CPU tensors, raise LoweringError for arguments that they do not implement, and fill every row that the documentation calls
undefined with NaN (integers: the lowest value). They also take float32 where the device has bfloat16 only, and return float32.
"""

GROUP_KERNELS: Mapping[str, Callable[[list[Arguments]], list[Any]]] = {
    **_named(
        "_c10d_functional",
        group.all_reduce,
        group.all_gather_into_tensor,
        group.reduce_scatter_tensor,
        group.all_to_all_single,
        group.broadcast,
    ),
    **_named("npu", group.npu_mm_reduce_scatter_base, group.npu_moe_distribute_dispatch_v2, group.npu_moe_distribute_combine_v2),
    **_named(NAMESPACE, fused_experts.dispatch_ffn_combine_w4a8),
}
"""Kernels of a whole group by the name of the operator overload: one (args, kwargs) per member in rank order, one result each."""


def group_of(op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The symbolic group, one of `ge_file.GROUPS`, that a call of a group kernel names.

    Raises:
        LoweringError: when the operator is no group kernel or the call names no group.
    """
    if op_name not in GROUP_ARGUMENTS:
        raise LoweringError(f"{op_name} does not communicate; those that do are {sorted(GROUP_ARGUMENTS)}")
    position, name = GROUP_ARGUMENTS[op_name]
    group_name = args[position] if len(args) > position else kwargs.get(name)
    if not isinstance(group_name, str):
        raise LoweringError(f"{op_name}: its group is {group_name!r}; legal is a name, such as 'tp', 'world' or 'dispatch'")
    return group_name
