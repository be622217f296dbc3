"""lowering/ascend/prefetch.py: weights that the next products read are fetched beside a collective, as many as links give time for."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from support.emulated import DeviceGraph

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend import prefetch
from npucompile.lowering.ascend.cost.estimate import estimate, timeline
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.ge_file import FETCH, GeFile, on_one_stream, parse
from npucompile.lowering.ascend.nz_weights import weight_operands
from npucompile.lowering.platform import Platform

A3, MESH = Platform("ascend910_93", "9.1", prefetch=True), Mesh.parse("dp=16")
SPEEDS = parameters(A3.chip)
MIB = 2**20


def layers(count: int = 2, rows: int = 64, widths: tuple[int, ...] = (4096, 2048), parts: int = 1) -> GeFile:
    """Layers of a dispatch and a combine, and behind each products with weights of so many columns of 8 KiB."""
    hand = DeviceGraph()
    x, ids = hand.operand(0, f"bf16[{rows},4096]", "x"), hand.operand(1, f"i32[{rows},8]", "ids")
    weights = [hand.operand(2 + i, f"bf16[4096,{width}]", f"weight{i}") for i, width in enumerate(widths)]
    exchange = {"group_ep": "dispatch", "ep_world_size": 16, "ep_rank_id": 0, "moe_expert_num": 128}
    for layer in range(count):
        op = functools.partial(
            lambda layer, kind, inputs, name, *meta, **more: hand.op(kind, inputs, f"layer0{layer}_moe/{name}", meta, **more), layer
        )
        sent = ["bf16[4096,4096]", "f32[4096]", "i32[524288]", "i64[8]", "i32[128]", "i32[1]", "f32[1]"]
        for part in range(parts):
            routed = op("MoeDistributeDispatchV2", {"x": x, "expert_ids": ids}, f"dispatch{part}", *sent, **exchange)
            made = op("Swish", {"x": routed}, f"experts{part}", "bf16[4096,4096]", scale=1.0)
            x = op("MoeDistributeCombineV2", {"expand_x": made, "expert_ids": ids}, f"combine{part}", f"bf16[{rows},4096]", **exchange)
        for i, weight in enumerate(weights):
            y = op("MatMul", {"x1": x, "x2": weight}, f"product{i}", f"bf16[{rows},{widths[i]}]", transpose_x1=False, transpose_x2=False)
    return hand.file(x, y, inputs=2 + len(widths))


def fetched(file: GeFile) -> list[tuple[str, int, int]]:
    return [(fetch.beside.name, fetch.operand, fetch.max_size) for fetch in prefetch.fetches(file, MESH, A3)]


def test_weights_are_fetched_in_the_order_in_which_they_are_read_as_far_as_links_give_time() -> None:
    fixed = SPEEDS.exchange_latency_s + SPEEDS.exchange_hop_s
    room = int(fixed * SPEEDS.hbm_bytes_per_s * SPEEDS.memory_fraction)
    assert fetched(layers(1)) == [("layer00_moe/combine0", 2, 32 * MIB), ("layer00_moe/combine0", 3, 16 * MIB)]
    assert fetched(layers(1, widths=(6144, 4096))) == [
        ("layer00_moe/combine0", 2, 48 * MIB),
        ("layer00_moe/combine0", 3, room - 48 * MIB),
    ], "the last in part"
    assert [name for name, *_ in fetched(layers())] == [f"layer0{layer}_moe/combine0" for layer in (0, 0, 1, 1)], "each before its readers"
    assert fetched(layers(rows=8)) == fetched(layers(rows=64)), "sizes follow from no batch"


@pytest.mark.parametrize(
    "file",
    [
        layers(widths=(16384,)),  # larger than the cache
        layers(widths=(64,)),  # not worth a launch
        layers(parts=2),  # kernels run beside exchanges
    ],
)
def test_what_gains_nothing_is_left(file: GeFile) -> None:
    assert fetched(file) == []
    assert prefetch.in_ge(file, MESH, A3) is file


def test_collectives_of_dense_models_are_one_time_each_up_to_a_product() -> None:
    hand = DeviceGraph()
    x, weight = hand.operand(0, "bf16[64,4096]", "x"), hand.operand(1, "bf16[4096,4096]", "weight")
    ring = {"group": "tp", "rank_size": 16, "fusion": 0, "fusion_id": -1}
    for i in range(2):
        part = hand.op("HcomReduceScatter", {"x": x}, f"layer00_mlp/scatter{i}", ["bf16[4,4096]"], reduction="sum", **ring)
        x = hand.op("HcomAllGather", {"x": part}, f"layer00_mlp/gather{i}", ["bf16[64,4096]"], **ring)
        x = hand.op("MatMul", {"x1": x, "x2": weight}, f"layer00_mlp/product{i}", ["bf16[64,4096]"], transpose_x1=False, transpose_x2=False)
    one_s = SPEEDS.collective_latency_s + 4 * SPEEDS.collective_hop_s
    room = int(2 * one_s * SPEEDS.hbm_bytes_per_s * SPEEDS.memory_fraction)
    found = prefetch.fetches(hand.file(x, inputs=2), Mesh.parse("tp=16"), A3)
    assert [(fetch.beside.name, fetch.max_size) for fetch in found] == [(f"layer00_mlp/scatter{i}", min(room, 32 * MIB)) for i in range(2)]


def test_only_builds_that_ask_for_it_have_it() -> None:
    assert prefetch.in_ge(layers(), MESH, replace(A3, prefetch=False)) == layers()


def test_a_graph_runs_each_fetch_behind_what_the_combine_sends() -> None:
    made = prefetch.in_ge(layers(), MESH, A3)
    ops = [op for op in parse(made.graph).graph[0].op if op.type == FETCH]
    assert [list(op.input) for op in ops[:2]] == [[f"weight{i}:0", "layer00_moe/experts0:-1"] for i in (0, 1)]
    (end,) = (op for op in parse(made.graph).graph[0].op if op.type == "NetOutput")
    assert list(end.input[-4:]) == [f"{op.name}:-1" for op in ops], "GE drops what nothing waits for"
    assert made.overlaps
    assert weight_operands(made) == weight_operands(layers()), "formats stay"
    assert not on_one_stream(made).overlaps
    assert parse(on_one_stream(made).graph) == parse(layers().graph)


def test_the_price_of_readers_falls_and_fetches_hide_behind_the_combine() -> None:
    plain, made = (estimate(file, SPEEDS, MESH, 0, A3) for file in (layers(), prefetch.in_ge(layers(), MESH, A3)))
    rates = SPEEDS.hbm_bytes_per_s * SPEEDS.memory_fraction, SPEEDS.cache_bytes_per_s
    saved_ms = 2 * 48 * MIB * (1 / rates[0] - 1 / rates[1]) * 1e3
    assert plain.step_ms - made.step_ms == pytest.approx(saved_ms)
    assert made.hbm_bytes == pytest.approx(plain.hbm_bytes)
    assert made.streams["prefetch"]["launches"] == 4
    late = prefetch.in_ge(layers(1), MESH, A3)
    times = {lasting.type: lasting for lasting in reversed(timeline(late, SPEEDS, MESH, 0, A3))}
    assert times[FETCH].end_ms <= times["MatMul"].start_ms, "who reads what is on its way waits"
