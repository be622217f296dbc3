"""lowering/ascend/cost/work.py: bytes, operations and messages of operators against what their definition says."""

from __future__ import annotations

from typing import Any

import pytest
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.cost.work import routed_rows, work_of
from npucompile.lowering.ascend.ge_operators import operators
from npucompile.lowering.ascend.ge_types import declared_type
from npucompile.lowering.ascend.legality.nodes import of_ge
from npucompile.lowering.ascend.operators.work import Facts, Rows, Work


def work(
    kind: str, inputs: dict[str, str], results: list[str], *, pools: tuple[str, ...] = (), context: int = 64, rows: Any = None, **attrs: Any
) -> Work:
    """Work of one operator whose operands all lie in HBM."""
    hand = gc.Hand()
    for i, meta in enumerate(inputs.values()):
        hand.data(i, meta)
    hand.op(kind, {name: f"x{i}:0" for i, name in enumerate(inputs)}, "op", results, **attrs)
    types = {f"x{i}:0": declared_type(meta.encode()) for i, meta in enumerate(inputs.values())}
    resident, names = {name: name for name in types}, list(inputs)
    types |= {f"op:{port}": declared_type(meta.encode()) for port, meta in enumerate(results)}
    in_place = frozenset(f"x{names.index(name)}:0" for name in pools)
    groups = {"tp": 4, "dispatch": 4}
    nodes = of_ge(operators(hand.model.graph[0].op), types, range(len(inputs)))
    return work_of(nodes[-1], Facts(types, resident, in_place, context, groups, 1e8, 0.6, 2.0, rows or {}))


def test_products():
    dense = work("MatMul", {"x1": "bf16[20,64]", "x2": "bf16[64,48]"}, ["bf16[20,48]"], transpose_x1=False)
    assert dense.bf16_ops == 2 * 32 * 48 * 64, "20 rows fill two tiles of 16"
    assert (dense.hbm_bytes, dense.cache_bytes) == (2 * (20 * 64 + 64 * 48), 2 * 20 * 48)
    quantised = work("QuantBatchMatmulV3", {"x1": "i8[16,64]", "x2": "i8[64,48]", "scale": "f32[48]"}, ["bf16[16,48]"])
    assert (quantised.int8_ops, quantised.bf16_ops) == (2 * 16 * 48 * 64, 0)


def test_grouped_products_read_packed_weights_of_the_experts_that_have_rows():
    operands = {"x0": "i8[64,128]", "weight0": "i32[8,128,32]", "scale0": "u64[8,1,256]", "group_list": "i64[8]"}
    grouped = work("GroupedMatmul", operands, ["bf16[64,256]"])
    assert grouped.int8_ops == pytest.approx(2 * 64 * 256 * 128, rel=0.1)
    weights = 8 * 128 * 256 / 2
    assert 0.9 * weights < grouped.hbm_bytes < weights + 64 * 128 + 8 * 256 * 8 + 100


def test_an_activation_of_experts_does_the_rows_that_are_there():
    """64 rows of room; a quarter of 40 rows on each of four ranks, twice as many on the busiest."""
    operands = {"x": "bf16[64,128]", "group_index": "i64[8]"}
    full = work("DequantSwigluQuant", operands, ["i8[64,64]", "f32[64]"])
    share = work("DequantSwigluQuant", operands, ["i8[64,64]", "f32[64]"], rows={"x1:0": Rows(10, 40, 8, 32)})
    assert share.hbm_bytes == pytest.approx(full.hbm_bytes * 2 * 10 / 64)
    assert share.vector_ops == pytest.approx(full.vector_ops * 2 * 10 / 64)


def test_attention_reads_each_request_s_context_once():
    paged = {"query": "bf16[6,4,64]", "key0": "bf16[32,16,128]", "value0": "bf16[32,16,128]", "block_table": "i32[3,8]"}
    attrs = {"num_heads": 4, "num_key_value_heads": 2, "block_size": 16}
    attended = work("FusedInferAttentionScore", paged, ["bf16[6,4,64]"], **attrs)
    assert attended.streamed_bytes == 2 * 3 * 64 * 2 * 64 * 2
    assert (attended.tasks, attended.attention_ops) == (6, 4 * 6 * 4 * 64 * 63)
    most = work("FusedInferAttentionScore", paged, ["bf16[6,4,64]"], context=10**6, **attrs)
    assert most.streamed_bytes == 2 * attended.streamed_bytes, "a page table of 8 pages of 16 tokens holds 128"


def test_attention_without_pages_is_of_every_query_over_every_key():
    heads = dict.fromkeys(("query", "key0", "value0"), "bf16[2,256,4,80]")
    operands = {**heads, "actual_seq_lengths_kv": "i64[2]"}
    attended = work("FusedInferAttentionScore", operands, ["bf16[2,256,4,80]"], num_heads=4, input_layout="BSND")
    assert (attended.tasks, attended.attention_ops) == (2 * 4 * 2, 4 * 2 * 256 * 4 * 80 * 256)
    assert attended.streamed_bytes == 2 * 2 * 256 * 4 * 80 * 2


def test_attention_over_int8_reads_a_byte_a_channel_and_a_scale_a_head():
    paged = {"query": "bf16[3,1,256]", "key0": "i8[32,16,128]", "value0": "i8[32,16,128]", "block_table": "i32[3,8]"}
    attrs = {"num_heads": 4, "num_key_value_heads": 2, "block_size": 16}
    static = work("FusedInferAttentionScore", {**paged, "key_antiquant_scale": "bf16[1,128]"}, ["bf16[3,1,256]"], **attrs)
    assert static.streamed_bytes == 2 * 3 * 64 * 2 * 64
    scaled = work("FusedInferAttentionScore", {**paged, "key_antiquant_scale": "f32[32,2,16]"}, ["bf16[3,1,256]"], **attrs)
    assert scaled.streamed_bytes == 2 * 3 * 64 * 2 * (64 + 4)


def test_attention_over_latents_reads_them_once_for_keys_and_values():
    paged = {"query": "bf16[3,2,2048]", "key0": "bf16[32,16,512]", "value0": "bf16[32,16,512]", "block_table": "i32[3,8]"}
    paged |= {"query_rope": "bf16[3,2,256]", "key_rope": "bf16[32,16,64]"}
    attended = work("FusedInferAttentionScore", paged, ["bf16[3,2,2048]"], num_heads=4, num_key_value_heads=1, block_size=16)
    assert attended.streamed_bytes == 3 * 64 * (512 + 64) * 2
    assert attended.attention_ops == 6 * 4 * 2 * (512 + 64 + 512) * 63


def test_an_indexer_reads_all_keys_of_a_request_once():
    paged = {"query": "bf16[2,3,32,128]", "key": "bf16[80,16,1,128]", "weights": "bf16[2,3,32]", "block_table": "i32[2,40]"}
    floats = work("LightningIndexer", paged, ["i32[2,3,1,64]"], context=600)
    assert floats.streamed_bytes == 2 * 600 * 256
    assert floats.attention_ops == 2 * 2 * 3 * 32 * (600 - 1.5) * 128
    rounded = {name: kind.replace("bf16", "i8") for name, kind in paged.items() if name != "weights"} | {"weights": "f16[2,3,32]"}
    rounded |= {"query_dequant_scale": "f16[2,3,32]", "key_dequant_scale": "f16[80,16,1]"}
    integers = work("QuantLightningIndexer", rounded, ["i32[2,3,1,64]"], context=600)
    assert integers.streamed_bytes == 2 * 600 * 130
    assert (integers.attention_ops, integers.vector_ops) == (floats.attention_ops / 2, floats.vector_ops)


@pytest.mark.parametrize(("context", "entries"), [(600, 3 * 64), (100, 100)], ids=["own keys", "all keys once"])
def test_attention_over_chosen_keys_reads_those(context, entries):
    chosen, table = {"sparse_indices": "i32[2,3,1,64]"}, {"block_table": "i32[2,40]"}
    pools = {"key": "bf16[80,16,1,512]", "value": "bf16[80,16,1,512]", "query_rope": "bf16[2,3,4,64]", "key_rope": "bf16[80,16,1,64]"}
    floats = work("SparseFlashAttention", {"query": "bf16[2,3,4,512]", **chosen, **table, **pools}, ["bf16[2,3,4,512]"], context=context)
    assert floats.streamed_bytes == 2 * entries * 1152
    assert floats.attention_ops == 2 * 2 * 3 * 4 * 64 * (576 + 512)
    packed = {"query": "bf16[2,3,4,576]", "key": "i8[80,16,1,656]", "value": "i8[80,16,1,656]"}
    integers = work("KvQuantSparseFlashAttention", {**packed, **chosen, **table}, ["bf16[2,3,4,512]"], context=context)
    assert integers.streamed_bytes == 2 * entries * 656
    assert integers.attention_ops == floats.attention_ops
    assert (floats.vector_ops, integers.vector_ops) == (0, 2 * 2 * 3 * 64 * 512)


def test_a_pool_costs_what_is_read_and_written_of_it():
    pool = {"var": "bf16[1000,64]", "indices": "i32[4,1]", "updates": "bf16[4,64]"}
    scattered = work("ScatterNdUpdate", pool, ["bf16[1000,64]"], pools=("var",))
    assert scattered.hbm_bytes + scattered.cache_bytes == 2 * (16 + 4 * 64 * 2)
    gathered = work("GatherV2", {"x": "bf16[1000,64]", "indices": "i32[4]", "axis": "i64[]"}, ["bf16[4,64]"])
    assert gathered.hbm_bytes + gathered.cache_bytes == 16 + 2 * 4 * 64 * 2


def test_a_recurrence_reads_a_state_a_request_and_writes_one_a_token():
    operands = {
        "query": "bf16[8,2,16]", "key": "bf16[8,2,16]", "value": "bf16[8,4,16]", "state": "bf16[100,4,16,16]",
        "actual_seq_lengths": "i32[2]",
    }  # fmt: skip
    rule = work("RecurrentGatedDeltaRule", operands, ["bf16[8,4,16]", "bf16[100,4,16,16]"], pools=("state",))
    assert rule.streamed_bytes == (2 + 8) * 4 * 16 * 16 * 2


@pytest.mark.parametrize(
    ("kind", "given", "result", "received"),
    [
        ("HcomAllGather", "bf16[2,8]", "bf16[8,8]", 96),
        ("HcomReduceScatter", "bf16[8,8]", "bf16[2,8]", 96),
        ("HcomAllReduce", "bf16[8,8]", "bf16[8,8]", 192),
        ("HcomAllToAll", "bf16[8,8]", "bf16[8,8]", 96),
    ],
)
def test_bytes_of_collectives(kind, given, result, received):
    assert work(kind, {"x": given}, [result], group="tp").sent_bytes == received


def test_experts_exchange_a_row_a_token_and_choice():
    ids = {"x": "bf16[4,64]", "expert_ids": "i32[4,3]"}
    exchange = work("MoeDistributeDispatchV2", ids, ["i8[48,64]"], ep_world_size=4, group_ep="dispatch")
    assert exchange.sent_bytes == 2.0 * 4 * 3 * 64 * 3 / 4


def test_unknown_collectives_and_groups_are_refused():
    with pytest.raises(LoweringError, match=r"op \(HcomGather\) is a collective whose bytes are not known"):
        work("HcomGather", {"x": "bf16[8]"}, ["bf16[8]"], group="tp")
    with pytest.raises(LoweringError, match="over 'pp'; the mesh has dispatch, tp"):
        work("HcomAllReduce", {"x": "bf16[8]"}, ["bf16[8]"], group="pp")


def routed(kind: str, **attrs):
    hand = gc.Hand()
    ids = {"x": hand.data(0, "bf16[4,64]"), "expert_ids": hand.data(1, "i32[4,3]")}
    hand.op(kind, ids, "route", ["bf16[12,64]"] * 4, **attrs)
    hand.op("Cast", {"x": "route:2"}, "counts", ["i64[2]"])
    ops = operators(hand.model.graph[0].op)
    types = {f"{op.name}:{port}": declared_type(desc.attr["_meta"].s) for op in ops for port, desc in enumerate(op.output_desc)}
    nodes = {node.name: node for node in of_ge(ops, types, range(2))}
    return routed_rows(nodes, types, "counts:0", 4), routed_rows(nodes, types, "x0:0", 4)


def test_rows_are_those_of_the_routing():
    assert routed("MoeDistributeDispatchV2", ep_world_size=4, moe_expert_num=8) == (Rows(12, 48, 2, 8), None)
    assert routed("MoeInitRoutingV3", expert_num=8, active_expert_range=[2, 4])[0] == Rows(3, 12, 2, 8)
