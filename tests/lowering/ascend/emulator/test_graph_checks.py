"""lowering/ascend/emulator/graph_checks.py: each thing that a device would punish is named."""

from __future__ import annotations

from typing import Any

import pytest
from support.emulated import DeviceGraph

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.communicator import Communicator
from npucompile.lowering.ascend.emulator.graph_checks import check_communication, check_formats, claim, communicator_of, data_formats
from npucompile.lowering.ascend.emulator.memory import ND, NZ


def products(meta: str = "bf16[64,32]", kind: str = "MatMul", slot: str = "x2", number: int = ND) -> Any:
    """x @ weight, with the weight in a format."""
    hand = DeviceGraph()
    x, weight = hand.operand(0, "bf16[4,64]", "x"), hand.operand(1, meta, "weight")
    inputs = {"x1": x, slot: weight} if kind == "MatMul" else {"x": x, slot: weight}
    hand.op(kind, inputs, "product")
    graph = hand.model.graph[0]
    for op, value in zip(graph.op[:2], (ND, number), strict=True):
        op.output_desc[0].attr["format_for_int"].i = value
    return graph


def grouped(meta: str, number: int, scale: str = "", *, cast: bool = False) -> Any:
    """A GroupedMatmul whose weight, or what it is a Bitcast of, is in a format."""
    hand = DeviceGraph()
    inputs = {"x0": hand.operand(0, "i8[4,64]", "x"), "weight0": hand.operand(1, meta, "weight")}
    if scale:
        inputs["scale0"] = hand.operand(2, scale, "scale")
    if cast:
        inputs["weight0"] = hand.op("Bitcast", {"x": inputs["weight0"]}, "int4")
    hand.op("GroupedMatmul", inputs, "product")
    graph = hand.model.graph[0]
    for op in graph.op:
        if op.type == "Data":
            op.output_desc[0].attr["format_for_int"].i = number if op.name == "weight" else ND
        elif op.type == "Bitcast":
            op.attr["type"].dt = 29
        elif scale:
            next(desc for desc in op.input_desc if desc.name == "scale0").dtype = graph.op[2].output_desc[0].dtype
    return graph


@pytest.mark.parametrize(
    "graph",
    [
        grouped("i32[4,64,8]", NZ, cast=True),
        grouped("i8[4,64,32]", NZ, "f32[4,32]"),
        products(number=NZ),
        products(number=ND),
        products("i8[64,32]", "GroupedMatmulSwigluQuantV2", "weight0", NZ),
        products("i32[64,4]", "GroupedMatmulSwigluQuantV2", "weight0", ND),
        products("i8[64,32]", "GroupedMatmul", "weight0", ND),
    ],
)
def test_weights_of_products_may_be_in_nz(graph: Any) -> None:
    check_formats(graph)
    assert data_formats(graph)["x:0"] == ND


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (products(kind="Transpose", slot="x", number=NZ), r"product \(Transpose\) takes weight:0, which is in NZ, as x; legal is ND"),
        (products(slot="x3", number=NZ), r"product \(MatMul\) takes weight:0, which is in NZ, as x3"),
        (products("bf16[64,40]", number=NZ), r"weight:0 is in NZ and its sizes \[64, 40\] do not fill its tiles"),
        (products("i8[64,32]", "GroupedMatmulSwigluQuantV2", "weight0"), r"takes weight:0, int8 in ND, as weight0; legal is NZ"),
        (grouped("i8[4,64,32]", ND, "f32[4,32]"), r"product \(GroupedMatmul\) takes weight:0, int8 in ND, as weight0; legal is NZ"),
        (grouped("i32[4,64,12]", NZ, cast=True), r"weight:0 is in NZ and its sizes \[4, 64, 12\] do not fill its tiles"),
        (grouped("i32[4,64,8]", NZ), r"weight:0, int32 in NZ, as weight0; legal is its Bitcast"),
        (products(number=3), "weight:0 is in format number 3; legal are"),
    ],
)
def test_formats_that_a_reader_does_not_take_are_refused(graph: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        check_formats(graph)


def test_formats_must_have_been_written() -> None:
    graph = products()
    del graph.op[1].output_desc[0].attr["format_for_int"]
    with pytest.raises(LoweringError, match="weight has no storage format"):
        check_formats(graph)


def exchange(kind: str = "MoeDistributeDispatchV2", **attrs: Any) -> Any:
    hand = DeviceGraph()
    hand.op(kind, {"x": hand.operand(0, "bf16[4,64]")}, "talk", **attrs)
    hand.model.graph[0].name = "decode"
    return hand.model.graph[0]


ALONE = {"emulated/tp/4": Communicator("emulated/tp/4", None, 4)}


def test_attributes_of_this_rank_are_legal() -> None:
    check_communication(exchange(group_ep="emulated/tp/4", ep_rank_id=0, ep_world_size=1), ALONE, 4)
    check_communication(exchange("HcomAllGather", group="emulated/tp/4", rank_size=1), ALONE, 4)
    assert communicator_of(exchange("Neg", group="tp").op[1]) is None


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (exchange(group_ep="emulated/tp/4", ep_rank_id=1), "ep_rank_id is 1; rank 4 is member 0 of the 1 of 'emulated/tp/4', so that 0 is"),
        (exchange(group_ep="emulated/tp/4", ep_world_size=2), "ep_world_size is 2; .* 1 is legal"),
        (exchange("HcomAllGather", group="emulated/tp/4", rank_size=2), "rank_size is 2"),
        (exchange("HcomAllGather", group="tp"), r"talk \(HcomAllGather\) communicates over the symbol 'tp', which was not replaced"),
        (exchange("HcomAllGather", group="emulated/tp/0"), r"over 'emulated/tp/0'; this process \(rank 4\) has emulated/tp/4"),
    ],
)
def test_attributes_of_another_rank_are_refused(graph: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        check_communication(graph, ALONE, 4)


def test_expert_exchange_shares_its_communicator_with_nobody() -> None:
    owners: dict[str, tuple[bool, str]] = {}
    claim(owners, exchange(group_ep="a"))
    claim(owners, exchange("MoeDistributeCombineV2", group_ep="a"))
    claim(owners, exchange("HcomAllGather", group="b"))
    with pytest.raises(LoweringError, match=r"'a' is used by decode/talk \(MoeDistributeDispatchV2\) and by decode/talk \(HcomAllGather\)"):
        claim(owners, exchange("HcomAllGather", group="a"))
    with pytest.raises(LoweringError, match=r"'b' is used by decode/talk \(HcomAllGather\) and by decode/talk \(MoeDistributeDispatchV2\)"):
        claim(owners, exchange(group_ep="b"))
