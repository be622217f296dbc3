"""GE's fused operators, run by the CPU kernels of the torch_npu operators that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....graphs.errors import LoweringError
from . import kernels_attention as attention
from . import kernels_dense as dense
from . import kernels_gating as gating
from . import kernels_moe as moe
from . import kernels_sparse as sparse
from . import kernels_state as state
from .ge_ops_common import Call, Function, Int4, Results

_INT8 = 2
# Attribute `dtype` of a grouped product numbers dtypes in a way of its own.
_PRODUCT_DTYPES: Mapping[int, torch.dtype | None] = {-1: None, 0: torch.float16, 1: torch.bfloat16, 2: torch.int32}


def _rms_norm(call: Call) -> Results:
    return dense.npu_rms_norm(call.tensor("x"), call.tensor("gamma"), call.attr("epsilon", 1e-6))


def _add_rms_norm(call: Call) -> Results:
    return dense.npu_add_rms_norm(call.tensor("x1"), call.tensor("x2"), call.tensor("gamma"), call.attr("epsilon", 1e-6))


def _add_rms_norm_dynamic_quant(call: Call) -> Results:
    # The default is written 1 in torchair, and is DT_INT8 in GE's own table.
    if (kind := call.attr("dst_type", _INT8)) not in (1, _INT8):
        raise LoweringError(f"{call.op}: attribute dst_type is {kind}; legal is {_INT8} (int8)")
    return dense.npu_add_rms_norm_dynamic_quant(
        call.tensor("x1"),
        call.tensor("x2"),
        call.tensor("gamma"),
        smooth_scale1=call.optional("smooth_scale1"),
        smooth_scale2=call.optional("smooth_scale2"),
        epsilon=call.attr("epsilon", 1e-6),
        output_mask=call.attr("output_mask") or None,
    )


def _swiglu(call: Call) -> Results:
    return dense.npu_swiglu(call.tensor("x"), call.attr("dim", -1))


def _rotary_mul(call: Call) -> Results:
    return dense.npu_rotary_mul(call.tensor("x"), call.tensor("r1"), call.tensor("r2"))


def _dynamic_quant(call: Call) -> Results:
    call.expect(dst_type=_INT8)
    return dense.npu_dynamic_quant(call.tensor("x"), smooth_scales=call.optional("smooth_scales"))


def _static_quant(call: Call) -> Results:
    call.expect(dst_type=_INT8, axis=-1, round_mode="round", sqrt_mode=False)
    return dense.npu_quantize(call.tensor("x"), call.tensor("scale"), call.optional("offset"), torch.int8, -1, False)


def _quant_matmul(call: Call) -> Results:
    call.expect(group_size=0)
    x1, x2 = call.tensor("x1"), call.tensor("x2")
    return dense.npu_quant_matmul(
        x1.mT if call.attr("transpose_x1", False) else x1,
        x2.mT if call.attr("transpose_x2", False) else x2,
        _signed(call.tensor("scale")),
        pertoken_scale=call.optional("pertoken_scale"),
        bias=call.optional("bias"),
        output_dtype=call.dtype("dtype"),
    )


def _weight_quant_matmul(call: Call) -> Results:
    call.expect(transpose_x=False, transpose_weight=False, inner_precise=0, dtype=-1)
    if unknown := [slot for slot in ("antiquant_offset", "quant_scale", "quant_offset", "bias") if call.optional(slot) is not None]:
        raise LoweringError(f"{call.op}: {', '.join(unknown)} are given and have no CPU kernel; legal is to leave them out")
    scale, size = call.tensor("antiquant_scale"), call.attr("antiquant_group_size", 0)
    return dense.npu_weight_quant_batchmatmul(call.tensor("x"), call.tensor("weight"), scale, antiquant_group_size=size)


def _signed(scale: torch.Tensor) -> torch.Tensor:
    """A scale as int64, the dtype that the kernels have for its 64 bits."""
    return scale.view(torch.int64) if scale.dtype == torch.uint64 else scale


def _moe_gating(call: Call) -> Results:
    return gating.npu_moe_gating_top_k_softmax_v2(
        call.tensor("x"),
        k=call.attr("k"),
        finished=call.optional("finished"),
        renorm=call.attr("renorm", 0),
        output_softmax=call.attr("output_softmax_result_flag", False),
    )


_GATING_ATTRS: Mapping[str, Any] = {
    "k_group": 1,
    "group_count": 1,
    "group_select_mode": 0,
    "renorm": 0,
    "norm_type": 0,
    "out_flag": False,
    "routed_scaling_factor": 1.0,
    "eps": 1e-20,
}


def _moe_gating_of_groups(call: Call) -> Results:
    options = {name: call.attr(name, default) for name, default in _GATING_ATTRS.items()}
    return gating.npu_moe_gating_top_k(call.tensor("x"), call.attr("k"), bias=call.optional("bias"), **options)


def _moe_init_routing(call: Call) -> Results:
    call.expect(expert_capacity=-1, drop_pad_mode=0)
    return moe.npu_moe_init_routing_v2(
        call.tensor("x"),
        call.tensor("expert_idx"),
        scale=call.optional("scale"),
        active_num=call.attr("active_num", -1),
        expert_num=call.attr("expert_num", -1),
        expert_tokens_num_type=call.attr("expert_tokens_num_type", 0),
        expert_tokens_num_flag=call.attr("expert_tokens_num_flag", False),
        quant_mode=call.attr("quant_mode", -1),
        active_expert_range=call.attr("active_expert_range") or None,
        row_idx_type=call.attr("row_idx_type", 0),
    )


def _moe_finalize_routing(call: Call) -> Results:
    return moe.npu_moe_finalize_routing(
        call.tensor("expanded_x"),
        call.optional("x1"),
        call.optional("x2"),
        call.optional("bias"),
        call.optional("scales"),
        call.tensor("expanded_row_idx"),
        call.optional("expert_idx"),
        call.attr("drop_pad_mode", 0),
        call.attr("k", 1),
    )


def _weight(call: Call) -> torch.Tensor:
    """Stacked weights; int4 as the int32 words that hold it, which operators take as int4 alone."""
    value = call.value("weight0")
    if isinstance(value, Int4):
        return value.packed
    if (weight := call.tensor("weight0")).dtype == torch.int32:
        raise LoweringError(f"{call.op}: weight0 is {tuple(weight.shape)} int32; legal is its Bitcast to int4")
    return weight


def _scale(call: Call, slot: str) -> torch.Tensor:
    """The scale of stacked weights, for the kernels; int4 has bits of f32 in uint64."""
    scale = call.tensor(slot)
    if scale.dtype == torch.int64:
        raise LoweringError(f"{call.op}: {slot} is {tuple(scale.shape)} int64; legal is uint64 beside int4 weights")
    return _signed(scale)


def _grouped_matmul(call: Call) -> Results:
    call.expect(transpose_weight=False, transpose_x=False, act_type=0)
    call.ignore("tuning_config")
    if call.single("offset") is not None:
        raise LoweringError(f"{call.op} has offset, which the interpreter does not know; legal is to leave it out")
    number = call.attr("dtype", 0)
    if number not in _PRODUCT_DTYPES:
        raise LoweringError(f"{call.op}: attribute dtype is {number}; legal are {sorted(_PRODUCT_DTYPES)}")
    bias, scale, rows = call.single("bias"), _scale(call, "scale0"), call.optional("per_token_scale")
    antiquant = {slot: call.single(slot) for slot in ("antiquant_scale", "antiquant_offset")}
    (y,) = moe.npu_grouped_matmul(
        [call.tensor("x0")],
        [_weight(call)],
        bias=None if bias is None else [bias],
        scale=[scale] if scale.numel() else None,
        per_token_scale=None if rows is None else [rows],
        **{slot: [tensor] for slot, tensor in antiquant.items() if tensor is not None},
        group_list=call.optional("group_list"),
        split_item=call.attr("split_item", 0),
        group_type=call.attr("group_type", -1),
        group_list_type=call.attr("group_list_type", 0),
        output_dtype=_PRODUCT_DTYPES[number],
    )
    return y


def _grouped_matmul_swiglu_quant(call: Call) -> Results:
    call.expect(quant_mode=0, quant_dtype=_INT8, transpose_weight=False)
    # The CPU kernel rounds once, at the end, whatever type the device has for the product before that.
    call.ignore("dequant_dtype", "tuning_config")
    assist = call.single("weight_assist_matrix")
    return moe.npu_grouped_matmul_swiglu_quant_v2(
        call.tensor("x"),
        [_weight(call)],
        [_scale(call, "weight_scale0")],
        call.tensor("x_scale"),
        call.tensor("group_list"),
        weight_assist_matrix=None if assist is None else [assist],
        dequant_mode=call.attr("dequant_mode", 0),
        group_list_type=call.attr("group_list_type", 0),
    )


def _dequant_swiglu_quant(call: Call) -> Results:
    call.expect(quant_mode="dynamic", dst_type=_INT8, round_mode="rint", activate_dim=-1, swiglu_mode=0)
    # These belong to another swiglu_mode.
    call.ignore("clamp_limit", "glu_alpha", "glu_bias")
    return moe.npu_dequant_swiglu_quant(
        call.tensor("x"),
        weight_scale=call.optional("weight_scale"),
        activation_scale=call.optional("activation_scale"),
        group_index=call.optional("group_index"),
        activate_left=call.attr("activate_left", False),
        quant_mode=1,
    )


def _scatter_pa_kv_cache(call: Call) -> Results:
    call.expect(scatter_mode="None", strides=[1, 1], offsets=[0, 0])
    slots = ("key", "value", "key_cache", "value_cache", "slot_mapping")
    return state.npu_scatter_pa_kv_cache_functional(*map(call.tensor, slots), cache_mode=call.attr("cache_mode", "Norm"))


_ATTENTION_ATTRS: Mapping[str, Any] = {
    "num_heads": 1,
    "scale": 1.0,
    "pre_tokens": 2**31 - 1,
    "next_tokens": 2**31 - 1,
    "input_layout": "BSH",
    "num_key_value_heads": 0,
    "sparse_mode": 0,
    "inner_precise": 0,
    "block_size": 0,
    "softmax_lse_flag": False,
    "key_antiquant_mode": 0,
    "value_antiquant_mode": 0,
}


def _attention(call: Call) -> Results:
    call.expect(antiquant_mode=0, query_quant_mode=0, pse_type=0, out_dtype=0)
    options = {name: call.attr(name, default) for name, default in _ATTENTION_ATTRS.items()}
    return attention.npu_fused_infer_attention_score(
        call.tensor("query"),
        call.tensor("key0"),
        call.tensor("value0"),
        atten_mask=call.optional("atten_mask"),
        actual_seq_lengths=call.optional("actual_seq_lengths"),
        actual_seq_lengths_kv=call.optional("actual_seq_lengths_kv"),
        block_table=call.optional("block_table"),
        query_rope=call.optional("query_rope"),
        key_rope=call.optional("key_rope"),
        key_antiquant_scale=call.optional("key_antiquant_scale"),
        value_antiquant_scale=call.optional("value_antiquant_scale"),
        **options,
    )


def _lightning_indexer(call: Call) -> Results:
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key", "block_table")
    defaults = {"layout_query": "BSND", "layout_key": "BSND", "sparse_count": 2048, "sparse_mode": 3}
    call.expect(pre_tokens=2**63 - 1, next_tokens=2**63 - 1, return_values=False)
    options = {name: call.optional(name) for name in names} | {name: call.attr(name, default) for name, default in defaults.items()}
    return sparse.npu_lightning_indexer(call.tensor("query"), call.tensor("key"), call.tensor("weights"), **options)


def _sparse_flash_attention(call: Call) -> Results:
    names = ("block_table", "actual_seq_lengths_query", "actual_seq_lengths_kv", "query_rope", "key_rope")
    defaults = {"sparse_block_size": 1, "layout_query": "BSND", "layout_kv": "BSND", "sparse_mode": 3, "attention_mode": 0}
    call.expect(pre_tokens=2**63 - 1, next_tokens=2**63 - 1, return_softmax_lse=False)
    options = {name: call.optional(name) for name in names} | {name: call.attr(name, default) for name, default in defaults.items()}
    query, key, value, indices = map(call.tensor, ("query", "key", "value", "sparse_indices"))
    return sparse.npu_sparse_flash_attention(query, key, value, indices, call.attr("scale_value"), **options)


def _recurrent_gated_delta_rule(call: Call) -> Results:
    query, key, value, pool = map(call.tensor, ("query", "key", "value", "state"))
    names = ("beta", "actual_seq_lengths", "ssm_state_indices", "num_accepted_tokens", "g")
    options: dict[str, Any] = {name: call.optional(name) for name in names} | {"scale": call.attr("scale_value", 1.0)}
    lengths = options["actual_seq_lengths"]
    # vllm-ascend's operator has the same type; its lengths begin with the first row, 0, which is no length that CANN's takes.
    if lengths is None or lengths[0] != 0:
        return state.npu_recurrent_gated_delta_rule_functional(query, key, value, pool, **options)
    pool = pool.clone()
    return state.npu_recurrent_gated_delta_rule(query, key, value, pool, **options), pool


FUSED: Mapping[str, Function] = {
    "RmsNorm": _rms_norm,
    "AddRmsNorm": _add_rms_norm,
    "AddRmsNormDynamicQuant": _add_rms_norm_dynamic_quant,
    "SwiGlu": _swiglu,
    "RotaryMul": _rotary_mul,
    "DynamicQuant": _dynamic_quant,
    "AscendQuantV2": _static_quant,
    "QuantBatchMatmulV3": _quant_matmul,
    "WeightQuantBatchMatmulV2": _weight_quant_matmul,
    "MoeGatingTopK": _moe_gating_of_groups,
    "MoeGatingTopKSoftmaxV2": _moe_gating,
    "DequantSwigluQuant": _dequant_swiglu_quant,
    "MoeInitRoutingV3": _moe_init_routing,
    "MoeFinalizeRoutingV2": _moe_finalize_routing,
    "GroupedMatmul": _grouped_matmul,
    "GroupedMatmulSwigluQuantV2": _grouped_matmul_swiglu_quant,
    "ScatterPaKvCache": _scatter_pa_kv_cache,
    "FusedInferAttentionScore": _attention,
    "LightningIndexer": _lightning_indexer,
    "SparseFlashAttention": _sparse_flash_attention,
    "RecurrentGatedDeltaRule": _recurrent_gated_delta_rule,
}
"""Functions of one rank by type of operator; those that write in place return what they write."""
