"""lowering/ascend/emulator/checks.py: each thing that a device would punish is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support.emulated import DeviceGraph, on_device, on_devices, opened

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.acl_graph.formats import weight_operands
from npucompile.lowering.ascend.emulator.checks import check_communication, check_formats, data_formats
from npucompile.lowering.ascend.emulator.communicator import EmulatedCommunicator
from npucompile.lowering.ascend.emulator.device import EmulatedDevice
from npucompile.lowering.ascend.emulator.device_state import DeviceState
from npucompile.lowering.ascend.emulator.ge_program import GeProgram
from npucompile.lowering.ascend.emulator.memory import ND, NZ, PinnedMemory
from npucompile.lowering.ascend.emulator.stream import Stream


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
    return GeProgram(hand.model_with(hand.op(kind, {"x": hand.operand(0, "bf16[4,64]")}, "talk", **attrs))).steps


def of_rank_four(*names: str) -> DeviceState:
    """A device of rank 4, whose groups have no other members."""
    state = DeviceState("emulated:0", Stream("emulated:0"), PinnedMemory(), "1", rank=4)
    state.communicators.update({name: EmulatedCommunicator(name, None, 4) for name in names})
    return state


def test_attributes_of_this_rank_are_legal() -> None:
    check_communication(exchange(group_ep="own", ep_rank_id=0, ep_world_size=1), of_rank_four("own"), "decode")
    check_communication(exchange("HcomAllGather", group="own", rank_size=1), of_rank_four("own"), "decode")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (exchange(group_ep="own", ep_rank_id=1, ep_world_size=1), "rank is 1; rank 4 is member 0 of the 1 of 'own', so that 0 is"),
        (exchange(group_ep="own", ep_rank_id=0, ep_world_size=2), "members is 2; .* 1 is legal"),
        (exchange("HcomAllGather", group="own", rank_size=2), "members is 2"),
        (exchange("HcomAllGather", group="tp"), r"talk \(HcomAllGather\) communicates over the symbol 'tp', which was not replaced"),
        (exchange("HcomAllGather", group="other"), r"over 'other'; this process \(rank 4\) has own"),
    ],
)
def test_attributes_of_another_rank_are_refused(steps: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        check_communication(steps, of_rank_four("own"), "decode")


def test_expert_exchange_shares_its_communicator_with_nobody() -> None:
    state = of_rank_four("a", "b")
    for steps in (exchange(group_ep="a"), exchange("MoeDistributeCombineV2", group_ep="a"), exchange("HcomAllGather", group="b")):
        check_communication(steps, state, "decode")
    with pytest.raises(LoweringError, match=r"'a' is used by decode/talk \(Moe\w+\) and by prefill/talk \(HcomAllGather\)"):
        check_communication(exchange("HcomAllGather", group="a"), state, "prefill")
    with pytest.raises(LoweringError, match=r"'b' is used by decode/talk \(HcomAllGather\) and by prefill/talk \(Moe\w+\)"):
        check_communication(exchange(group_ep="b"), state, "prefill")


# --- graphs of torch operators ---


@pytest.mark.usefixtures("ta")
def test_nz_is_for_weights_of_products(device: EmulatedDevice, tmp_path: Path) -> None:
    made, _ = ag.of_body(
        lambda x, w, v: (torch.ops.npu.npu_linear(x, w) + v.sum(),),
        inputs_x=((4, 16), ag.BF16), inputs_w=((32, 16), ag.BF16), inputs_v=((32, 16), ag.BF16),
    )  # fmt: skip
    x, w, v = (on_device(device, torch.ones(shape, dtype=ag.BF16)) for shape in ((4, 16), (32, 16), (32, 16)))
    executable = opened(device, made, tmp_path)
    assert executable.nz_operands == {1}
    with pytest.raises(LoweringError, match=r"operand inputs.v is in NZ and read by aten.sum.default; legal is ND"):
        executable.compile([x, device.to_nz(w), device.to_nz(v)])
    executable.compile([x, device.to_nz(w), v])
    plain = opened(device, made, tmp_path)
    plain.switch_off({"nz"})
    assert plain.nz_operands == frozenset()
    plain.compile([x, w, v])


@pytest.mark.usefixtures("ta")
def test_int8_weights_of_the_first_product_of_experts_are_in_nz_alone(device: EmulatedDevice, tmp_path: Path) -> None:
    def body(x: Any, weight: Any, scale: Any, rows: Any, counts: Any) -> tuple[Any, ...]:
        out, _ = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(x, [weight], [scale], rows, counts, group_list_type=1)
        return (out,)

    shapes = {"x": ((4, 32), torch.int8), "weight": ((2, 32, 64), torch.int8), "scale": ((2, 64), ag.F32), "rows": ((4,), ag.F32)}
    operands = {**{f"inputs_{name}": shape for name, shape in shapes.items()}, "inputs_counts": ((2,), ag.I64)}
    made, _ = ag.of_body(body, **operands)
    there = [on_device(device, torch.ones(shape).to(dtype)) for shape, dtype in operands.values()]
    with pytest.raises(LoweringError, match=r"takes inputs.weight, int8 in ND; legal is NZ for int8 weights"):
        opened(device, made, tmp_path).compile(there)
    executable = opened(device, made, tmp_path)
    executable.switch_off({"nz"})
    assert executable.nz_operands == {1}
    executable.compile([there[0], device.to_nz(there[1]), *there[2:]])


@pytest.mark.usefixtures("ta")
def test_fused_experts_take_int4_in_nz_alone_and_share_their_communicator_with_nothing(tmp_path: Path) -> None:
    packages.declare()
    shapes = {
        "x": ((24, 64), ag.BF16), "up": ((2, 64, 8), ag.I32), "down": ((2, 32, 8), ag.I32), "ids": ((24, 2), ag.I32),
        "scale": ((2, 64), ag.I64), "assist": ((2, 64), ag.F32), "probs": ((24, 2), ag.F32),
    }  # fmt: skip

    def compiled(in_nz: bool, beside: str) -> Any:
        def body(x: Any, up: Any, down: Any, ids: Any, scale: Any, assist: Any, probs: Any) -> tuple[Any, ...]:
            fused = torch.ops.npucompile_packages.dispatch_ffn_combine_w4a8
            out = fused(x, up, down, ids, scale, scale, assist, assist, probs, "dispatch", 2, 96)
            sent = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, beside, 2, 0, 4, quant_mode=0)[0] if beside else x
            return (out + 1, sent + 1)

        made, _ = ag.of_body(body, captured=False, **{f"inputs_{name}": shape for name, shape in shapes.items()})
        assert weight_operands(made) == weight_operands(made, needed=True) == (1, 2)

        def work(device: EmulatedDevice, rank: int, names: Any) -> bool:
            operands = [on_device(device, torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes.values()]
            if in_nz:
                operands[1:3] = map(device.to_nz, operands[1:3])
            return bool(opened(device, made, tmp_path, rank, names).compile(operands))

        return on_devices(Mesh.parse("tp=2"), work)

    assert compiled(True, "") == [True, True]
    for in_nz, beside, message in (
        (False, "", "takes inputs.up, int32 in ND; legal is NZ"),
        (True, "dispatch", "a communicator of its own"),
    ):
        for error in compiled(in_nz, beside):
            assert isinstance(error, LoweringError)
            assert message in str(error)


@pytest.mark.usefixtures("ta")
def test_the_expert_exchange_shares_its_communicator_with_nothing(tmp_path: Path) -> None:
    def body(x: Any, ids: Any, group: str, ranks: int) -> tuple[Any, ...]:
        rows, *_ = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, group, ranks, 0, 8, quant_mode=0)
        return (rows.sum() + torch.ops._c10d_functional.all_reduce(x, "sum", "tp").sum(),)

    def compiled(group: str, ranks: int) -> Any:
        shapes = {"inputs_x": ((4, 32), ag.BF16), "inputs_ids": ((4, 2), ag.I32)}
        made, _ = ag.of_body(lambda x, ids: body(x, ids, group, ranks), captured=False, **shapes)

        def work(device: EmulatedDevice, rank: int, names: Any) -> bool:
            operands = [on_device(device, torch.ones(4, 32, dtype=ag.BF16)), on_device(device, torch.zeros(4, 2, dtype=ag.I32))]
            return bool(opened(device, made, tmp_path, rank, names).compile(operands))

        return on_devices(Mesh.parse("tp=2"), work)

    assert compiled("dispatch", 2) == [True, True]
    for group, ranks, message in (("tp", 2, "legal is a communicator of its own"), ("dispatch", 4, "members is 4; rank")):
        for error in compiled(group, ranks):
            assert isinstance(error, LoweringError)
            assert message in str(error)
