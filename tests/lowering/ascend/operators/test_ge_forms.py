"""lowering/ascend/operators: what torchair makes of a torch_npu operator equals the operator's CPU kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.quantise import pack_w4, quantise_rows, quantise_w4, quantise_w8
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.inspect_ge import census
from npucompile.lowering.ascend.operators.attention import causal_mask
from npucompile.lowering.ascend.operators.call import Int4
from npucompile.lowering.ascend.operators.table import KERNELS, OPERATORS

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
COUNTS = torch.tensor([3, 0, 2, 1])
GROUPS = {"group_list": COUNTS, "split_item": 2, "group_type": 0, "group_list_type": 1}


def d(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return gc.draw(*shape, seed=seed, dtype=dtype)


def attention(layout: str, **more: Any) -> tuple[Any, ...]:
    query = {"TND": d(6, 4, 64), "BSND": d(2, 3, 4, 64)}[layout]
    options = {
        "atten_mask": causal_mask(),
        "actual_seq_lengths": torch.tensor([3, 6]) if layout == "TND" else torch.tensor([3, 3]),
        "actual_seq_lengths_kv": torch.tensor([21, 4]),
        "block_table": torch.tensor([[2, 0], [1, 0]], dtype=I32),
        "num_heads": 4, "num_key_value_heads": 2, "scale": 64**-0.5, "input_layout": layout, "sparse_mode": 3, "block_size": 16,
    }  # fmt: skip
    return (query, d(3, 16, 128, seed=1), d(3, 16, 128, seed=2)), options | more


SPARSE = {"block_table": torch.tensor([[2, 1], [3, 0]], dtype=I32), "layout_query": "BSND", "sparse_mode": 3}


def latent_attention() -> tuple[Any, ...]:
    cache = d(3, 16, 32, seed=1)
    options = {
        "atten_mask": causal_mask(), "actual_seq_lengths_kv": torch.tensor([21, 4]),
        "block_table": torch.tensor([[2, 0], [1, 0]], dtype=I32), "query_rope": d(2, 3, 4 * 8, seed=2), "key_rope": d(3, 16, 8, seed=3),
        "num_heads": 4, "num_key_value_heads": 1, "scale": 0.2, "input_layout": "BSH", "sparse_mode": 3, "block_size": 16,
    }  # fmt: skip
    return (d(2, 3, 4 * 32), cache, cache), options


def sparse_attention() -> tuple[Any, ...]:
    cache, chosen = d(5, 8, 1, 16, seed=1), gc.i32([[7, 2]], [[0, 9]], [[10, -1]]).expand(2, 3, 1, 2).contiguous()
    options = {
        **SPARSE, "actual_seq_lengths_kv": gc.i32(11, 11), "query_rope": d(2, 3, 4, 8, seed=3), "key_rope": d(5, 8, 1, 8, seed=4),
        "layout_kv": "PA_BSND", "attention_mode": 2,
    }  # fmt: skip
    return (d(2, 3, 4, 16), cache, cache, chosen, 0.2), options


def delta(**more: Any) -> tuple[Any, ...]:
    options = {
        "beta": d(4, 4).sigmoid(), "scale": 0.5, "actual_seq_lengths": gc.i32(2, 2), "ssm_state_indices": gc.i32(1, 2, 4, 3),
        "num_accepted_tokens": gc.i32(1, 2), "g": -d(4, 4, dtype=F32).abs(),
    }  # fmt: skip
    return (d(4, 2, 8), d(4, 2, 8, seed=1), d(4, 4, 16, seed=2), d(5, 4, 16, 8, seed=3)), options | more


def routing(**more: Any) -> tuple[Any, ...]:
    options = {"active_num": 8, "expert_num": 6, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [1, 4]}
    return (d(4, 16), gc.i32([1, 2], [3, 0], [2, 5], [1, 3])), options | more


def quantised(scheme: str, **more: Any) -> tuple[Any, ...]:
    """Operands of the grouped operators: six int8 rows for four experts of [16, 8]; w4a8 also takes the correction for packing."""
    rows, scales = quantise_rows(d(6, 16, dtype=F32))
    weight = d(4, 16, 8, seed=1, dtype=F32)
    if scheme == "w8a8":
        return rows, *quantise_w8(weight), None, scales
    return rows, *quantise_w4(weight), scales


def grouped(scheme: str) -> tuple[Any, ...]:
    rows, weight, scale, bias, per_token = quantised(scheme)
    options = GROUPS | {"scale": [scale.to(BF16) if scheme == "w8a8" else scale], "per_token_scale": [per_token], "output_dtype": BF16}
    return ([rows], [weight]), options | ({} if bias is None else {"bias": [bias]})


def swiglu(scheme: str) -> tuple[Any, ...]:
    rows, weight, scale, assist, per_token = quantised(scheme)
    options = {"group_list_type": 1, "quant_dtype": 1, "dequant_dtype": 6}
    scale = scale.view(torch.uint64) if scale.dtype == torch.int64 else scale
    return (rows, [weight], [scale], per_token, COUNTS), options | ({} if assist is None else {"weight_assist_matrix": [assist]})


def dense() -> tuple[Any, ...]:
    rows, scales = quantise_rows(d(5, 16, dtype=F32))
    weight, scale = quantise_w8(d(16, 6, seed=1, dtype=F32))
    return (rows, weight, scale), {"pertoken_scale": scales, "output_dtype": BF16}


def static() -> tuple[Any, ...]:
    """With a correction in the units of the integer sum, and no scale a row."""
    (rows, weight, scale), _ = dense()
    return (rows, weight, scale), {"bias": gc.i32(5, -3, 100, 0, 7, -40), "output_dtype": BF16}


def int4() -> tuple[Any, ...]:
    """With scales of groups."""
    weight = pack_w4(torch.arange(-8, 8, dtype=torch.int8).repeat(64).view(64, 16))
    return (d(4, 64), weight, d(2, 16, seed=1)), {"antiquant_group_size": 32}


ACTIVATION = {"group_index": COUNTS, "activate_left": True, "quant_mode": 1}
FINALIZE = (None, None, None, d(4, 2, seed=1))
KV = (d(2, 2, 8), d(2, 2, 8, seed=1), d(3, 4, 2, 8, seed=2), d(3, 4, 2, 8, seed=3), gc.i32(5, 10))
# GE type, torch operator, its arguments and options.
CASES: list[tuple[str, str, tuple[Any, ...]]] = [
    ("RmsNorm", "npu.npu_rms_norm", ((d(2, 3, 16), d(16), 1e-3), {})),
    ("RmsNorm", "npu.npu_rms_norm", ((d(3, 16, dtype=F32), d(16, dtype=F32), 1e-6), {})),
    ("AddRmsNorm", "npu.npu_add_rms_norm", ((d(4, 16), d(4, 16, seed=1), d(16, seed=2), 1e-3), {})),
    ("AddRmsNormDynamicQuant", "npu.npu_add_rms_norm_dynamic_quant", ((d(4, 16), d(4, 16, seed=1), d(16, seed=2)), {
        "epsilon": 1e-5, "smooth_scale1": d(16, seed=3), "smooth_scale2": d(16, seed=4), "output_mask": [True, True]})),
    ("SwiGlu", "npu.npu_swiglu", ((d(4, 16),), {})),
    ("SwiGlu", "npu.npu_swiglu", ((d(4, 16), 0), {})),
    ("RotaryMul", "npu.npu_rotary_mul", ((d(1, 4, 3, 8), d(1, 4, 1, 8, seed=1), d(1, 4, 1, 8, seed=2)), {})),
    ("DynamicQuant", "npu.npu_dynamic_quant", ((d(2, 4, 16),), {})),
    ("DynamicQuant", "npu.npu_dynamic_quant", ((d(4, 16),), {"smooth_scales": d(16, seed=1)})),
    ("AscendQuantV2", "npu.npu_quantize", ((d(4, 16), d(1, seed=1), torch.full((1,), 3.0, dtype=BF16), torch.int8, -1, False), {})),
    ("AscendQuantV2", "npu.npu_quantize", ((d(4, 16), d(16, seed=1), None, torch.int8, -1, False), {})),
    ("QuantBatchMatmulV3", "npu.npu_quant_matmul", dense()),
    ("QuantBatchMatmulV3", "npu.npu_quant_matmul", static()),
    ("WeightQuantBatchMatmulV2", "npu.npu_weight_quant_batchmatmul", int4()),
    ("MoeGatingTopKSoftmaxV2", "npu.npu_moe_gating_top_k_softmax_v2", ((d(4, 8, dtype=F32),), {"k": 3, "renorm": 1})),
    ("MoeGatingTopKSoftmaxV2", "npu.npu_moe_gating_top_k_softmax_v2", ((d(4, 8),), {"k": 3})),
    ("MoeGatingTopK", "npu.npu_moe_gating_top_k", ((d(4, 8, dtype=F32), 3), {"bias": d(8, seed=1, dtype=F32), "k_group": 2,
        "group_count": 4, "group_select_mode": 1, "norm_type": 1, "routed_scaling_factor": 2.5})),
    ("MoeGatingTopK", "npu.npu_moe_gating_top_k", ((d(4, 8), 3), {"out_flag": True})),
    ("DequantSwigluQuant", "npu.npu_dequant_swiglu_quant", ((d(6, 16),), ACTIVATION)),
    ("DequantSwigluQuant", "npu.npu_dequant_swiglu_quant", ((torch.arange(96, dtype=I32).view(6, 16),), ACTIVATION | {
        "weight_scale": d(4, 16, dtype=F32), "activation_scale": d(6, 1, dtype=F32)})),
    ("MoeInitRoutingV3", "npu.npu_moe_init_routing_v2", routing()),
    ("MoeInitRoutingV3", "npu.npu_moe_init_routing_v2", routing(quant_mode=1, row_idx_type=1, expert_tokens_num_type=0)),
    ("MoeFinalizeRoutingV2", "npu.npu_moe_finalize_routing", ((d(8, 16), *FINALIZE, torch.arange(8, dtype=I32), None, 2, 2), {})),
    ("MoeFinalizeRoutingV2", "npu.npu_moe_finalize_routing", (
        (d(2, 3, 16), d(4, 16, seed=2), *FINALIZE[1:], gc.i32(0, -1, 5, 4, 3, 1, 1, -1), None, 3), {})),
    ("GroupedMatmul", "npu.npu_grouped_matmul", (([d(6, 16)], [d(4, 16, 8, seed=1)]), GROUPS)),
    ("GroupedMatmul", "npu.npu_grouped_matmul", (([d(7, 16, dtype=F32)], [d(4, 16, 8, seed=1, dtype=F32)]), GROUPS)),
    ("GroupedMatmul", "npu.npu_grouped_matmul", grouped("w8a8")),
    ("GroupedMatmul", "npu.npu_grouped_matmul", grouped("w4a8")),
    ("GroupedMatmulSwigluQuantV2", "npu.npu_grouped_matmul_swiglu_quant_v2", swiglu("w8a8")),
    ("GroupedMatmulSwigluQuantV2", "npu.npu_grouped_matmul_swiglu_quant_v2", swiglu("w4a8")),
    ("ScatterPaKvCache", "npu.npu_scatter_pa_kv_cache_functional", (KV, {"cache_mode": "Norm"})),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", attention("TND")),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", attention("TND", softmax_lse_flag=True)),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", attention("BSND")),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", latent_attention()),
    ("LightningIndexer", "npu.npu_lightning_indexer", ((d(2, 3, 4, 16), d(5, 8, 1, 16, seed=1), d(2, 3, 4, seed=2)), {
        **SPARSE, "actual_seq_lengths_key": gc.i32(11, 5), "layout_key": "PA_BSND", "sparse_count": 4})),
    ("SparseFlashAttention", "npu.npu_sparse_flash_attention", sparse_attention()),
    ("RecurrentGatedDeltaRule", "npu.npu_recurrent_gated_delta_rule_functional", delta()),
    ("RecurrentGatedDeltaRule", "npu.npu_recurrent_gated_delta_rule_functional", delta(num_accepted_tokens=None, beta=d(4, 4).sigmoid())),
]  # fmt: skip


@pytest.fixture(scope="module")
def ta(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return gc.gb.loaded(tmp_path_factory.mktemp("stubs"))


@pytest.mark.parametrize(("kind", "name", "case"), CASES, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(CASES)])
def test_what_torchair_makes_of_an_operator_is_its_kernel(ta: Any, kind: str, name: str, case: Any) -> None:
    flat, spec = pytree.tree_flatten(case)
    operands = [value.clone() for value in flat if isinstance(value, torch.Tensor)]
    namespace, op = name.split(".")

    def body(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(xs)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(value, torch.Tensor) else value for value in flat], spec)
        return told(getattr(getattr(torch.ops, namespace), op)(*args, **kwargs))

    _, ge_file = gc.shipped(ta, lambda *xs: tuple(x for x in body(*xs) if x.numel()), operands)
    assert kind in census(ge_file.graph)
    ((*results,),) = Interpreter(ge_file, Mesh())([[x.clone() for x in operands]])
    # Cloned, because int4 kernels overwrite their rows.
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, case)
    wanted = [want for want in told(KERNELS[f"{name}.default"](*args, **kwargs)) if want.numel()]
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert (want != 0).any()


def told(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def test_every_operator_is_tested() -> None:
    assert {kind for kind, *_ in CASES} == {kind for operator in OPERATORS if operator.widens for kind in operator.ge}


def test_a_scale_of_64_bits_may_be_unsigned() -> None:
    (rows, weight, scale), options = dense()
    inputs = {"x1": rows, "x2": weight, "pertoken_scale": options["pertoken_scale"]}
    bits = scale.view(I32).long()
    want = gc.run("QuantBatchMatmulV3", inputs | {"scale": scale}, dtype=27)
    assert torch.equal(gc.run("QuantBatchMatmulV3", inputs | {"scale": bits.to(torch.uint64)}, dtype=27), want)
    assert torch.equal(gc.run("QuantBatchMatmulV3", inputs | {"scale": scale, "x2": weight.T}, dtype=27, transpose_x2=True), want)
    assert torch.equal(gc.run("QuantBatchMatmulV3", inputs | {"scale": scale, "x1": rows.T}, dtype=27, transpose_x1=True), want)


NONE = {slot: torch.empty(0) for slot in ("bias0", "scale0", "offset0", "antiquant_scale0", "antiquant_offset0")}
PRODUCT = {"x0": d(6, 16), "weight0": d(4, 16, 8, seed=1), "group_list": COUNTS} | NONE
PRODUCT_ATTRS = {"split_item": 2, "group_type": 0, "group_list_type": 1, "dtype": -1}
GATE = {"x": d(4, 8)}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("AddRmsNormDynamicQuant", {"x1": d(4, 16), "x2": d(4, 16), "gamma": d(16)}, {"dst_type": 29}, "dst_type is 29; legal is 2"),
    ("DynamicQuant", GATE, {"dst_type": 29}, "dst_type is 29"),
    ("MoeGatingTopKSoftmaxV2", GATE, {"k": 2, "renorm": 2}, "renorm 2"),
    ("DequantSwigluQuant", GATE | {"group_index": COUNTS}, {"quant_mode": "static"}, "quant_mode is 'static'"),
    ("GroupedMatmul", PRODUCT | {"weight0": gc.i32([[1]])}, PRODUCT_ATTRS, r"weight0 is \(1, 1, 1\) int32; legal is its Bitcast to int4"),
    ("GroupedMatmul", PRODUCT | {"scale0": torch.ones(4, 1, 8, dtype=torch.int64)}, PRODUCT_ATTRS, r"scale0 is .* int64; legal is uint64"),
    ("MoeInitRoutingV3", {"x": d(4, 8), "expert_idx": gc.i32([1])}, {"drop_pad_mode": 1}, "drop_pad_mode is 1"),
    ("GroupedMatmul", PRODUCT | {"offset0": d(4)}, PRODUCT_ATTRS, "has offset, which the interpreter does not know"),
    ("GroupedMatmul", PRODUCT, PRODUCT_ATTRS | {"dtype": 3}, r"dtype is 3; legal are \[-1, 0, 1, 2\]"),
    ("GroupedMatmul", PRODUCT, PRODUCT_ATTRS | {"transpose_weight": True}, "transpose_weight is True"),
    ("GroupedMatmul", PRODUCT | {"weight0": Int4(gc.i32([[1]]))}, PRODUCT_ATTRS, r"group_list is \(4,\)"),
    ("GroupedMatmulSwigluQuantV2", {}, {"quant_dtype": 36}, "quant_dtype is 36"),
    ("ScatterPaKvCache", {}, {"scatter_mode": "Alibi"}, "scatter_mode is 'Alibi'"),
    ("ScatterPaKvCache", dict(zip(("key", "value", "key_cache", "value_cache", "slot_mapping"), KV, strict=True)),
     {"cache_mode": "PA_NZ"}, "cache_mode is 'PA_NZ'"),
    ("FusedInferAttentionScore", {}, {"out_dtype": 1}, "out_dtype is 1"),
    ("SwiGlu", {"x": d(4, 16), "bias": d(4)}, {}, "has bias, which the interpreter does not know"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attrs", "message"), REFUSED, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(REFUSED)])
def test_what_has_no_meaning_is_refused(kind: str, inputs: Any, attrs: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        gc.run(kind, inputs, **attrs)


def test_the_delta_rule_of_a_package_writes_its_float32_pool(ta: Any) -> None:
    """vllm-ascend's operator has the type of CANN's; its lengths begin with the first row."""
    packages.declare()
    (q, k, v, pool), options = delta(actual_seq_lengths=gc.i32(0, 2, 2))
    tensors = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    operands = [pool.float(), q, k, v, *tensors.values()]

    def body(pool: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor]:
        rule = torch.ops._C_ascend.npu_recurrent_gated_delta_rule
        return (rule(q, k, v, pool, scale=0.5, **dict(zip(tensors, rest, strict=True))),)

    _, ge_file = gc.shipped(ta, body, operands, states=1)
    assert ge_file.bound == (0,)
    written, wanted = operands[0].clone(), operands[0].clone()
    (((out,)),) = Interpreter(ge_file, Mesh())([[written, *operands[1:]]])
    want = KERNELS["_C_ascend.npu_recurrent_gated_delta_rule.default"](q, k, v, wanted, scale=0.5, **tensors)
    assert torch.equal(out, want)
    assert torch.equal(written, wanted)
    assert not torch.equal(written, operands[0])
