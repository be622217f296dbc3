"""legality/graph_rules.py, and the rows of the table for reports: what was refused is accepted once what was wrong is mended."""

from __future__ import annotations

import pytest
from support.ge_threads import mended, refused_by

from npucompile.lowering.ascend.legality.graph_rules import GRAPH_RULES, STREAMS, few_streams, ordered_exchange
from npucompile.lowering.ascend.legality.threads import ThreadSource, threads
from npucompile.lowering.ascend.operators.node import Node

BY_ID = {thread.id: thread for thread in threads()}
NARROW = {"query": "bf16[8,16,128]", "key0": "bf16[64,128,128]", "value0": "bf16[64,128,128]"}
MENDED = [
    ("attention-tnd-width-256", NARROW, {}),
    ("attention-tnd-width-256", {"query": "bf16[2,4,4096]"}, {"input_layout": "BSH"}),
    ("attention-tnd-no-mask", {"atten_mask": "bool[2048,2048]"}, {"sparse_mode": 3}),
    ("attention-mask-broadcast", {"atten_mask": None}, {}),
    ("attention-mask-broadcast", {"atten_mask": "bool[2048,2048]"}, {"sparse_mode": 3}),
    ("attention-block-size", {"key0": "bf16[64,128,1024]", "value0": "bf16[64,128,1024]"}, {"block_size": 128}),
    ("grouped-swiglu-int8-nd", {"weight0": "i8[128,2048,1024] NZ"}, {}),
    ("grouped-swiglu-int8-nd", {"weight0": "i4[128,2048,1024]", "weight_scale0": "u64[128,1024]"}, {}),
    ("grouped-nz-tiles", {"weight0": "bf16[32,360,2880]"}, {}),
    ("grouped-nz-tiles", {"x0": "bf16[64,368]", "weight0": "bf16[32,368,2880] NZ"}, {}),
    ("product-nz-one-column", {"x2": "bf16[2048,1]"}, {}),
    ("quant-product-scale-f16", {"scale": "f32[2112]"}, {}),
    ("quant-product-token-scale-rank", {"x1": "i8[64,4096]", "pertoken_scale": "f32[64]"}, {}),
    ("grouped-scale-count", {f"scale{i}": "f32[2048]" for i in range(9)}, {}),
    ("grouped-scale-count", {"scale0": "f32[0]"}, {}),
    ("grouped-list-length", {"group_list": "i64[16]"}, {}),
    ("transpose-product-size", {"x1": "bf16[64,64,512]", "x2": "bf16[64,512,128]"}, {}),
    ("dispatch-algorithm", {}, {"comm_alg": ""}),
    ("combine-empty-input", {"assist_info_for_combine": "i32[131072]"}, {}),
    ("rotary-width", {slot: "bf16[1,16,1,128]" for slot in ("query", "key", "cos", "sin")}, {}),
    ("delta-rule-state-f32", {"state": "bf16[9,32,128,128]"}, {}),
    ("delta-rule-tokens", {"actual_seq_lengths": "i32[2]"}, {}),
]


@pytest.mark.parametrize(("name", "inputs", "attributes"), MENDED)
def test_a_mended_operator_is_accepted(name, inputs, attributes):
    thread = BY_ID[name]
    slots = {slot: written for slot, written in {**thread.given.inputs, **inputs}.items() if written}
    assert thread.refused_by not in refused_by(mended(thread, inputs=slots, attributes={**thread.given.attributes, **attributes}))


@pytest.mark.parametrize("mode", [0, 1, None])
@pytest.mark.parametrize("producer", ["MoeDistributeDispatchV2", "MoeInitRoutingV3"])
@pytest.mark.parametrize("reader", [0, 1, None])
def test_lists_of_tokens_are_read_as_they_are_written(producer, mode, reader):
    """Defaults, as in CANN's operator definitions: dispatch counts, routing sums up, and a grouped product reads running sums."""
    attribute, output, default = ("expert_token_nums_type", 3, 1) if producer.endswith("V2") else ("expert_tokens_num_type", 2, 0)
    source = ThreadSource(producer, output, {} if mode is None else {attribute: mode})
    attributes = {"group_type": 0, "split_item": 2} | ({} if reader is None else {"group_list_type": reader})
    base = mended(BY_ID["grouped-list-length"], attributes=attributes, sources={"group_list": source})
    thread = mended(base, inputs={**base.given.inputs, "group_list": "i64[16]"})
    differs = (default if mode is None else mode) != (reader or 0)
    assert ("group_list_kind" in refused_by(thread)) == differs


def test_a_collective_is_ordered_against_dispatch_by_data_alone():
    """One before it, one after it, and one that shares only its input."""
    kinds = ("Data", "HcomAllGather", "MoeDistributeDispatchV2", "HcomReduceScatter", "HcomAllReduce")

    def unordered(last: str) -> list[tuple[str, str]]:
        sources = ("", "a:0", "b:0", "c:0", last)
        nodes = [Node(name, kind, input=(source,)) for name, kind, source in zip("abcde", kinds, sources, strict=True)]
        return [(node.name, message) for node, message in ordered_exchange(nodes)]

    assert [(name, "against c and 0 more" in message) for name, message in unordered("a:0")] == [("e", True)]
    assert unordered("d:0") == []


def test_a_kernel_that_starts_on_all_cores_is_ordered_against_dispatch():
    """The chunked delta rule waits for every core, which a dispatch may hold that waits for a rank behind its own delta rule."""
    for source, refused in (("a:0", ["c"]), ("b:0", [])):
        nodes = [
            Node("a", "Data"),
            Node("b", "MoeDistributeDispatchV2", input=("a:0",)),
            Node("c", "ChunkGatedDeltaRule", input=(source,)),
        ]
        assert [node.name for node, _ in ordered_exchange(nodes)] == refused


def test_a_graph_has_no_more_streams_than_a_device_reserves():
    nodes = [Node(f"n{i}", "Neg", stream=f"side{i}") for i in range(STREAMS)]
    assert [(node.name, message) for node, message in few_streams(nodes)] == [
        (f"n{STREAMS - 1}", f"is on stream {STREAMS + 1} of the graph; legal are {STREAMS} (STREAMS_PER_DEVICE), the first one included")
    ]
    assert not [*few_streams(nodes[1:])]


def test_every_refused_report_of_one_operator_has_a_mended_one():
    of_graphs = {None, *(rule.__name__ for rule in GRAPH_RULES)}
    assert {thread.id for thread in threads() if thread.refused_by not in of_graphs} == {name for name, _, _ in MENDED}
