"""lowering/ascend/operators/table.py: a walk over all operators.

Every kernel gives what torch_npu's Meta kernel says; what torchair makes of the call, by GE's form of the operator, is the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from support import ge_calls as gc

from npucompile.graphs import ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ops.packed_latents import packed_width
from npucompile.graphs.quantise import pack_w4, quantise_rows, quantise_w4, quantise_w8
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.operators.attention import causal_mask
from npucompile.lowering.ascend.operators.call import Int4
from npucompile.lowering.ascend.operators.record import Arguments
from npucompile.lowering.ascend.operators.table import FORMS, GROUP_KERNELS, KERNELS, OPERATORS, group_of

BF16, F32, I8, I32, I64 = torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64
COUNTS = torch.tensor([3, 0, 2, 1])
GROUPS = {"group_list": COUNTS, "split_item": 2, "group_type": 0, "group_list_type": 1}


def d(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return gc.draw(*shape, seed=seed, dtype=dtype)


def attention(layout: str, **more: Any) -> Arguments:
    query = {"TND": d(6, 4, 64), "BSND": d(2, 3, 4, 64), "BSH": d(2, 3, 256)}[layout]
    options = {
        "atten_mask": causal_mask(),
        "actual_seq_lengths": torch.tensor([3, 6]) if layout == "TND" else torch.tensor([3, 3]),
        "actual_seq_lengths_kv": torch.tensor([21, 4]),
        "block_table": torch.tensor([[2, 0], [1, 0]], dtype=I32),
        "num_heads": 4, "num_key_value_heads": 2, "scale": 64**-0.5, "input_layout": layout, "sparse_mode": 3, "block_size": 16,
    }  # fmt: skip
    return (query, d(3, 16, 128, seed=1), d(3, 16, 128, seed=2)), options | more


def segments() -> Arguments:
    options = {"actual_seq_lengths_kv": torch.tensor([5, 2]), "num_heads": 4, "scale": 0.2, "input_layout": "BSND"}
    return tuple(d(2, 5, 4, 16, seed=seed) for seed in range(3)), options


SPARSE = {"block_table": torch.tensor([[2, 1], [3, 0]], dtype=I32), "layout_query": "BSND", "sparse_mode": 3}


def latent_attention() -> Arguments:
    cache = d(3, 16, 32, seed=1)
    options = {
        "atten_mask": causal_mask(), "actual_seq_lengths_kv": torch.tensor([21, 4]),
        "block_table": torch.tensor([[2, 0], [1, 0]], dtype=I32), "query_rope": d(2, 3, 4 * 8, seed=2), "key_rope": d(3, 16, 8, seed=3),
        "num_heads": 4, "num_key_value_heads": 1, "scale": 0.2, "input_layout": "BSH", "sparse_mode": 3, "block_size": 16,
    }  # fmt: skip
    return (d(2, 3, 4 * 32), cache, cache), options


def sparse_attention() -> Arguments:
    cache, chosen = d(5, 8, 1, 16, seed=1), gc.i32([[7, 2]], [[0, 9]], [[10, -1]]).expand(2, 3, 1, 2).contiguous()
    options = {
        **SPARSE, "actual_seq_lengths_kv": gc.i32(11, 11), "query_rope": d(2, 3, 4, 8, seed=3), "key_rope": d(5, 8, 1, 8, seed=4),
        "layout_kv": "PA_BSND", "attention_mode": 2,
    }  # fmt: skip
    return (d(2, 3, 4, 16), cache, cache, chosen, 0.2), options


def packed_attention() -> Arguments:
    (query, _, _, chosen, scale), options = sparse_attention()
    empty = torch.zeros(5, 8, 1, packed_width(16, 8, BF16), dtype=I8)
    cache = ops.packed_latent_write(empty, d(40, 1, 16, seed=1), d(40, 1, 8, seed=4), torch.arange(40))
    rope = options.pop("query_rope")
    del options["key_rope"]
    return (torch.cat([query, rope], -1), cache, cache, chosen, scale, 2, 2), options | {"tile_size": 16, "rope_head_dim": 8}


def rounded_indexing() -> Arguments:
    (rows, own), (keys, scale) = (quantise_rows(d(*shape, seed=seed)) for seed, shape in enumerate([(2, 3, 4, 16), (5, 8, 1, 16)]))
    options = {**SPARSE, "actual_seq_lengths_key": gc.i32(11, 5), "layout_key": "PA_BSND", "sparse_count": 4}
    return (rows, keys, d(2, 3, 4, seed=2).half(), own.half(), scale.half(), 0, 0), options


def delta(**more: Any) -> Arguments:
    options = {
        "beta": d(4, 4).sigmoid(), "scale": 0.5, "actual_seq_lengths": gc.i32(2, 2), "ssm_state_indices": gc.i32(1, 2, 4, 3),
        "num_accepted_tokens": gc.i32(1, 2), "g": -d(4, 4, dtype=F32).abs(),
    }  # fmt: skip
    return (d(4, 2, 8), d(4, 2, 8, seed=1), d(4, 4, 16, seed=2), d(5, 4, 16, 8, seed=3)), options | more


def chunks() -> Arguments:
    (q, k, v, pool), options = delta()
    return (q, k, v), {name: options[name] for name in ("beta", "scale", "actual_seq_lengths", "g")} | {"initial_state": pool[:2]}


def routing(**more: Any) -> Arguments:
    options = {"active_num": 8, "expert_num": 6, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [1, 4]}
    return (d(4, 16), gc.i32([1, 2], [3, 0], [2, 5], [1, 3])), options | more


def quantised(scheme: str) -> tuple[Any, ...]:
    """Operands of the grouped operators: six int8 rows for four experts of [16, 8]; w4a8 also takes the correction for packing."""
    rows, scales = quantise_rows(d(6, 16, dtype=F32))
    weight = d(4, 16, 8, seed=1, dtype=F32)
    if scheme == "w8a8":
        return rows, *quantise_w8(weight), None, scales
    return rows, *quantise_w4(weight), scales


def grouped(scheme: str) -> Arguments:
    rows, weight, scale, bias, per_token = quantised(scheme)
    options = GROUPS | {"scale": [scale.to(BF16) if scheme == "w8a8" else scale], "per_token_scale": [per_token], "output_dtype": BF16}
    return ([rows], [weight]), options | ({} if bias is None else {"bias": [bias]})


def swiglu(scheme: str) -> Arguments:
    rows, weight, scale, assist, per_token = quantised(scheme)
    options = {"group_list_type": 1, "quant_dtype": 1, "dequant_dtype": 6}
    scale = scale.flatten(1).view(torch.uint64) if scale.dtype == I64 else scale
    return (rows, [weight], [scale], per_token, COUNTS), options | ({} if assist is None else {"weight_assist_matrix": [assist]})


def dense(**options: Any) -> Arguments:
    rows, scales = quantise_rows(d(5, 16, dtype=F32))
    weight, scale = quantise_w8(d(16, 6, seed=1, dtype=F32))
    return (rows, weight, scale), (options or {"pertoken_scale": scales}) | {"output_dtype": BF16}


W4 = pack_w4(torch.arange(-8, 8, dtype=I8).repeat(64).view(64, 16))
ACTIVATION = {"group_index": COUNTS, "activate_left": True, "quant_mode": 1}
SCALED = {"weight_scale": d(4, 16, dtype=F32), "activation_scale": d(6, 1, dtype=F32)}
KV = (d(2, 2, 8), d(2, 2, 8, seed=1), d(3, 4, 2, 8, seed=2), d(3, 4, 2, 8, seed=3), gc.i32(5, 10))
ROWS = (d(4, 2, 3), gc.i32([1], [0]), d(2, 2, 3, seed=1))
NORM = (d(4, 16), d(4, 16, seed=1), d(16, seed=2))
# GE type, "" where torchair converts it to none of its own, torch operator, its arguments and options.
CASES: list[tuple[str, str, Arguments]] = [
    ("RmsNorm", "npu.npu_rms_norm", ((d(2, 3, 16), d(16), 1e-3), {})),
    ("RmsNorm", "npu.npu_rms_norm", ((d(3, 16, dtype=F32), d(16, dtype=F32), 1e-6), {})),
    ("AddRmsNorm", "npu.npu_add_rms_norm", ((*NORM, 1e-3), {})),
    ("", "npu.npu_add_rms_norm_quant", ((*NORM, d(16), None), {"scales2": d(16)})),
    ("LayerNormV3", "aten.native_layer_norm", ((d(2, 3, 16), [16], d(16, seed=1), d(16, seed=2), 1e-3), {})),
    ("GeluV2", "npu.npu_gelu", ((d(4, 16),), {})),
    ("GeluV2", "npu.npu_gelu", ((d(4, 16),), {"approximate": "tanh"})),
    ("SwiGlu", "npu.npu_swiglu", ((d(4, 16),), {})),
    ("SwiGlu", "npu.npu_swiglu", ((d(4, 16), 0), {})),
    ("RotaryMul", "npu.npu_rotary_mul", ((d(1, 4, 3, 8), d(1, 4, 1, 8, seed=1), d(1, 4, 1, 8, seed=2)), {})),
    ("", "npu.npu_linear", ((d(4, 16), d(5, 16)), {})),
    ("", "aten.mm", ((d(4, 16), d(16, 5)), {})),
    ("", "aten.bmm", ((d(2, 4, 16), d(2, 16, 5)), {})),
    ("DynamicQuant", "npu.npu_dynamic_quant", ((d(2, 4, 16),), {})),
    ("AscendQuantV2", "npu.npu_quantize", ((d(4, 16), d(1, seed=1), torch.full((1,), 3.0, dtype=BF16), I8, -1, False), {})),
    ("AscendQuantV2", "npu.npu_quantize", ((d(4, 16), d(16, seed=1), None, I8, -1, False), {})),
    ("QuantBatchMatmulV3", "npu.npu_quant_matmul", dense()),
    ("QuantBatchMatmulV3", "npu.npu_quant_matmul", dense(bias=gc.i32(5, -3, 100, 0, 7, -40))),
    ("QuantBatchMatmulV3", "npu.npu_quant_matmul", dense(pertoken_scale=dense()[1]["pertoken_scale"], bias=d(6, seed=4))),
    ("WeightQuantBatchMatmulV2", "npu.npu_weight_quant_batchmatmul", ((d(4, 64), W4, d(2, 16, seed=1)), {"antiquant_group_size": 32})),
    ("MoeGatingTopKSoftmaxV2", "npu.npu_moe_gating_top_k_softmax_v2", ((d(4, 8, dtype=F32),), {"k": 3, "renorm": 1})),
    ("MoeGatingTopKSoftmaxV2", "npu.npu_moe_gating_top_k_softmax_v2", ((d(4, 8),), {"k": 3})),
    ("MoeGatingTopK", "npu.npu_moe_gating_top_k", ((d(4, 8, dtype=F32), 3), {"bias": d(8, seed=1, dtype=F32), "k_group": 2,
        "group_count": 4, "group_select_mode": 1, "norm_type": 1, "routed_scaling_factor": 2.5})),
    ("DequantSwigluQuant", "npu.npu_dequant_swiglu_quant", ((d(6, 16),), ACTIVATION)),
    ("DequantSwigluQuant", "npu.npu_dequant_swiglu_quant", ((torch.arange(96, dtype=I32).view(6, 16),), ACTIVATION | SCALED)),
    ("MoeInitRoutingV3", "npu.npu_moe_init_routing_v2", routing()),
    ("MoeInitRoutingV3", "npu.npu_moe_init_routing_v2", routing(quant_mode=1)),
    ("MoeFinalizeRoutingV2", "npu.npu_moe_finalize_routing", (
        (d(2, 4, 16), None, None, None, d(4, 2, seed=1), gc.i32(0, -1, 5, 4, 3, 1, 1, -1), None, 3), {})),
    ("GroupedMatmul", "npu.npu_grouped_matmul", (([d(6, 16)], [d(4, 16, 8, seed=1)]), GROUPS)),
    ("GroupedMatmul", "npu.npu_grouped_matmul", (([d(7, 16, dtype=F32)], [d(4, 16, 8, seed=1, dtype=F32)]), GROUPS)),
    ("GroupedMatmul", "npu.npu_grouped_matmul", grouped("w8a8")),
    ("GroupedMatmul", "npu.npu_grouped_matmul", grouped("w4a8")),
    ("GroupedMatmulSwigluQuantV2", "npu.npu_grouped_matmul_swiglu_quant_v2", swiglu("w8a8")),
    ("GroupedMatmulSwigluQuantV2", "npu.npu_grouped_matmul_swiglu_quant_v2", swiglu("w4a8")),
    ("ScatterPaKvCache", "npu.npu_scatter_pa_kv_cache_functional", (KV, {"cache_mode": "Norm"})),
    ("", "npu.npu_scatter_pa_kv_cache", (KV, {"cache_mode": "Norm"})),
    ("", "npu.npu_scatter_nd_update", (ROWS, {})),
    ("", "npu.npu_scatter_nd_update_", (ROWS, {})),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", attention("TND")),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", attention("BSND")),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", attention("BSH")),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", latent_attention()),
    ("FusedInferAttentionScore", "air.npu_fused_infer_attention_score", segments()),
    ("", "npu.npu_fused_infer_attention_score", attention("BSH", actual_seq_lengths=[3, 3], actual_seq_lengths_kv=[5, 4])),
    ("LightningIndexer", "npu.npu_lightning_indexer", ((d(2, 3, 4, 16), d(5, 8, 1, 16, seed=1), d(2, 3, 4, seed=2)), {
        **SPARSE, "actual_seq_lengths_key": gc.i32(11, 5), "layout_key": "PA_BSND", "sparse_count": 4})),
    ("SparseFlashAttention", "npu.npu_sparse_flash_attention", sparse_attention()),
    ("QuantLightningIndexer", "npu.npu_quant_lightning_indexer", rounded_indexing()),
    ("KvQuantSparseFlashAttention", "npu.npu_kv_quant_sparse_flash_attention", packed_attention()),
    ("RecurrentGatedDeltaRule", "npu.npu_recurrent_gated_delta_rule_functional", delta()),
    ("RecurrentGatedDeltaRule", "npu.npu_recurrent_gated_delta_rule_functional", delta(num_accepted_tokens=None)),
    ("", "npu.npu_recurrent_gated_delta_rule", delta()),
    ("", "_C_ascend.npu_recurrent_gated_delta_rule", delta(actual_seq_lengths=gc.i32(0, 2, 2))),
    ("ChunkGatedDeltaRule", "npu.npu_chunk_gated_delta_rule", chunks()),
    ("", "npucompile_packages.causal_conv1d_update", ((d(2, 3, 16), d(4, 16), d(5, 5, 16), gc.i64(1, 3), gc.i64(2, 1)), {})),
    ("", "npucompile_packages.fused_gdn_gating", ((d(6, dtype=F32), d(4, 6), d(4, 6), d(6, dtype=F32)), {})),
    ("", "npucompile_packages.rms_norm_gated", ((d(4, 8), d(8), d(4, 8), 1e-6), {})),
    ("", "npucompile_packages.split_qkv_rmsnorm_rope", ((d(4, 6 * 8), d(8), d(8), d(4, 4), 2, 1, 1e-6), {})),
    ("", "npucompile_packages.split_qk_norm", ((d(4, 32), d(8, dtype=F32), d(8, dtype=F32), 1e-8), {})),
    ("", "npucompile_packages.split_qkvzba", ((d(4, 2 * 4 + 4 * 8 + 4), 4, 8, 2), {})),
]  # fmt: skip


def dispatch(**more: Any) -> Arguments:
    return (d(4, 16), gc.i32([0, 2], [3, 1], [0, 7], [4, 5]), "world", 2, 0, 8), more


def combine(rank: int) -> Arguments:
    sent = GROUP_KERNELS["npu.npu_moe_distribute_dispatch_v2.default"]([dispatch(), dispatch()])[rank]
    args = (sent[0], dispatch()[0][1], sent[2], sent[4], d(4, 2, dtype=F32), "world", 2, 0, 8)
    return args, {"shared_expert_x": d(4, 16)}


def fused_experts() -> tuple[Any, ...]:
    """Two members with two experts each."""
    up, down = (torch.zeros(shape, dtype=I32) for shape in ((2, 64, 8), (2, 32, 8)))
    scales, chosen = [torch.ones(2, 64, dtype=I64)] * 2, torch.arange(2, dtype=I32).repeat(24, 1)
    return d(24, 64), up, down, chosen, *scales, torch.ones(2, 64), torch.ones(2, 64), torch.ones(24, 2), "world", 2, 96


# Torch operator, and its arguments and options on each of two ranks.
GROUP_CASES: list[tuple[str, Callable[[int], Arguments]]] = [
    ("_c10d_functional.all_reduce", lambda r: ((d(4, 2, seed=r), "sum", "tp"), {})),
    ("_c10d_functional.all_gather_into_tensor", lambda r: ((d(4, 2, seed=r), 2, "dp"), {})),
    ("_c10d_functional.reduce_scatter_tensor", lambda r: ((d(4, 2, seed=r), "sum", 2, "world"), {})),
    ("npu.npu_mm_reduce_scatter_base", lambda r: ((d(4, 3, seed=r), d(3, 2), "tp", 2), {"comm_mode": "aiv"})),
    ("_c10d_functional.all_to_all_single", lambda r: ((d(4, 2, seed=r), [2, 2], [2, 2], "tp"), {})),
    ("_c10d_functional.broadcast", lambda r: ((d(4, 2, seed=r), 1, "tp"), {})),
    ("npu.npu_moe_distribute_dispatch_v2", lambda r: dispatch(tp_world_size=1)),
    ("npu.npu_moe_distribute_dispatch_v2", lambda r: dispatch(quant_mode=2)),
    ("npu.npu_moe_distribute_combine_v2", combine),
    ("npucompile_packages.dispatch_ffn_combine_w4a8", lambda r: (fused_experts(), {})),
]
BOTH = [*((name, [case]) for _, name, case in CASES), *((name, [case(0), case(1)]) for name, case in GROUP_CASES)]


def operator(name: str) -> Any:
    packages.declare()
    namespace, op = name.split(".")
    return getattr(getattr(torch.ops, namespace), op).default


def copied(case: Arguments) -> Arguments:
    """Operands of a case that a kernel may write."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, case)
    return args, kwargs


def types(results: Any) -> list[tuple[list[int], torch.dtype]]:
    return [] if results is None else [(list(x.shape), x.dtype) for x in gc.flat(results)]


@pytest.mark.parametrize(("name", "cases"), BOTH, ids=gc.ids(BOTH))
def test_results_are_as_torch_npu_says(ta: Any, name: str, cases: list[Arguments]) -> None:
    calls = [copied(case) for case in cases]
    (args, kwargs), kernel = calls[0], KERNELS.get(f"{name}.default")
    results = [kernel(*args, **kwargs)] if kernel else GROUP_KERNELS[f"{name}.default"](calls)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), cases[0])
    wanted = types(operator(name)(*args, **kwargs))
    assert [types(each) for each in results] == [wanted] * len(calls)


CONVERTED = [case for case in CASES if case[0]]


@pytest.mark.parametrize(("kind", "name", "case"), CONVERTED, ids=gc.ids(CONVERTED))
def test_what_torchair_makes_of_an_operator_is_its_kernel(ta: Any, kind: str, name: str, case: Arguments) -> None:
    values, spec = pytree.tree_flatten(case)

    def body(*xs: torch.Tensor) -> Any:
        rest = iter(xs)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(value, torch.Tensor) else value for value in values], spec)
        return operator(name)(*args, **kwargs)

    results = gc.computed(ta, kind, body, [value for value in values if isinstance(value, torch.Tensor)])
    args, kwargs = copied(case)
    wanted = [want for want in gc.flat(KERNELS[f"{name}.default"](*args, **kwargs)) if want.numel()]
    gc.assert_equal(results, wanted, 1e-6)
    assert all((want != 0).any() for want in wanted)


@pytest.mark.parametrize(("name", "case"), GROUP_CASES, ids=gc.ids(GROUP_CASES))
def test_one_members_results_are_those_it_has_among_all(name: str, case: Callable[[int], Arguments]) -> None:
    kernel = GROUP_KERNELS[f"{name}.default"]
    whole = kernel([case(0), case(1)])
    for member, results in enumerate(whole):
        (alone,) = kernel([case(0), case(1)], [member])
        gc.assert_equal(gc.flat(alone), results)


def test_every_kernel_is_compared() -> None:
    assert {f"{name}.default" for _, name, _ in CASES} == set(KERNELS) - {"npu.npu_prefetch.default"}, "which gives nothing"
    assert {f"{name}.default" for name, _ in GROUP_CASES} == set(GROUP_KERNELS)
    assert {kind for kind, *_ in CONVERTED} == {kind for operator in OPERATORS if operator.widens for kind in operator.ge}


@pytest.mark.parametrize(("name", "case"), GROUP_CASES, ids=gc.ids(GROUP_CASES))
def test_groups_are_found_in_the_arguments(name: str, case: Callable[[int], Arguments]) -> None:
    (args, kwargs), overload = case(0), f"{name}.default"
    group = next(arg for arg in args if arg in ("tp", "dp", "world"))
    at = args.index(group)
    assert group_of(overload, args, kwargs) == group_of(overload, args[:at], {FORMS[overload].group[1]: group}) == group
    assert operator(name)._schema.arguments[at].name == FORMS[overload].group[1]


def test_what_does_not_talk_has_no_group() -> None:
    with pytest.raises(LoweringError, match=r"npu.npu_linear.default does not communicate"):
        group_of("npu.npu_linear.default", (), {})
    with pytest.raises(LoweringError, match="its group is None"):
        group_of("_c10d_functional.all_reduce.default", (torch.ones(1), "sum"), {})


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
    ("DynamicQuant", GATE, {"dst_type": 29}, "dst_type is 29"),
    ("MoeGatingTopKSoftmaxV2", GATE, {"k": 2, "renorm": 2}, "renorm 2"),
    ("DequantSwigluQuant", GATE | {"group_index": COUNTS}, {"quant_mode": "static"}, "quant_mode is 'static'"),
    ("GroupedMatmul", PRODUCT | {"weight0": gc.i32([[1]])}, PRODUCT_ATTRS, r"weight0 is \(1, 1, 1\) int32; legal is its Bitcast to int4"),
    ("GroupedMatmul", PRODUCT | {"scale0": torch.ones(4, 1, 8, dtype=I64)}, PRODUCT_ATTRS, r"scale0 is .* int64; legal is uint64"),
    ("MoeInitRoutingV3", {"x": d(4, 8), "expert_idx": gc.i32([1])}, {"drop_pad_mode": 1}, "drop_pad_mode is 1"),
    ("GroupedMatmul", PRODUCT | {"offset0": d(4)}, PRODUCT_ATTRS, "has offset, which the interpreter does not know"),
    ("GroupedMatmul", PRODUCT, PRODUCT_ATTRS | {"dtype": 3}, r"dtype is 3; legal are \[-1, 0, 1, 2\]"),
    ("GroupedMatmul", PRODUCT, PRODUCT_ATTRS | {"transpose_weight": True}, "transpose_weight is True"),
    ("GroupedMatmul", PRODUCT | {"weight0": Int4(gc.i32([[1]]))}, PRODUCT_ATTRS, r"group_list is \(4,\)"),
    ("GroupedMatmulSwigluQuantV2", {}, {"quant_dtype": 36}, "quant_dtype is 36"),
    ("WeightQuantBatchMatmulV2", GATE | {"bias": d(8)}, {}, "bias are given and have no CPU kernel"),
    ("ScatterPaKvCache", {}, {"scatter_mode": "Alibi"}, "scatter_mode is 'Alibi'"),
    ("ScatterPaKvCache", dict(zip(("key", "value", "key_cache", "value_cache", "slot_mapping"), KV, strict=True)),
     {"cache_mode": "PA_NZ"}, "cache_mode is 'PA_NZ'"),
    ("FusedInferAttentionScore", {}, {"out_dtype": 1}, "out_dtype is 1"),
    ("SwiGlu", {"x": d(4, 16), "bias": d(4)}, {}, "has bias, which the interpreter does not know"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "attrs", "message"), REFUSED, ids=gc.ids(REFUSED))
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


IN_PLACE = [(name, case) for _, name, case in CASES if (form := FORMS[f"{name}.default"]).in_place]


@pytest.mark.parametrize(("name", "case"), IN_PLACE, ids=gc.ids(IN_PLACE))
def test_forms_in_place_do_to_their_pools_what_the_functional_ones_return(name: str, case: Arguments) -> None:
    form, (args, kwargs) = FORMS[f"{name}.default"], copied(case)
    expected = gc.flat(KERNELS[form.name](*copied(case)[0], **kwargs))
    results = gc.flat(KERNELS[form.in_place](*args, **kwargs))
    gc.assert_equal(results, tuple(value for i, value in enumerate(expected) if i not in form.pools))
    for result, position in form.pools.items():
        assert torch.equal(args[position], expected[result])
        assert not torch.equal(args[position], case[0][position])
