"""Lowerings of the expert primitives for GE compute what their references compute, and torchair converts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import npu_lowerings as lowerings
from support.draws import Draw, ints, poison
from support.npu_lowerings import Example
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs import ops
from npucompile.graphs.errors import PrimitiveError
from npucompile.graphs.primitive import TABLE, Primitive
from npucompile.graphs.quantise import pack_w4, quantise_rows, quantise_w4, quantise_w4_values, quantise_w8
from npucompile.lowering.ascend.operators.table import GROUP_KERNELS
from npucompile.lowering.ascend.toolchain.harness import Torchair
from npucompile.lowering.platform import Platform

pytestmark = pytest.mark.usefixtures("ta")
BF16, F32 = torch.bfloat16, torch.float32
NEWEST = Platform("ascend910_93", "9.1").features("ge")
FEATURES = pytest.mark.parametrize("features", [frozenset(), NEWEST], ids=["any", "newest"])
# Rows of int8: in bfloat16 a half may be rounded to either side.
ROUNDED = {F32: 1e-4, BF16: 1e-1}


def rows_of_experts(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return [results[0][:9]]


def weights(r: Draw, E: int, M: int, F: int) -> tuple[torch.Tensor, torch.Tensor]:
    return r(E, M, 2 * F) * M**-0.5, r(E, F, M) * F**-0.5


def experts(r: Draw, quantise: Callable[..., Any] | None = None) -> Example:
    """Grouped products over 12 rows, 16 wide, of which four experts have nine."""
    (gate_up, down), rows, counts = weights(r, 4, 16, 8), r(12, 16), torch.tensor((3, 0, 5, 1))
    if quantise is None:
        return Example((rows, counts, gate_up, down), rows_of_experts)
    return Example((*quantise_rows(rows), counts, *quantise(gate_up), *quantise(down), r.dtype), rows_of_experts, ROUNDED)


def int4_beside_floats(r: Draw, group: int) -> Example:
    """As `experts`, of int4 beside rows that are not rounded."""
    (wide, wide_scale), (narrow, narrow_scale) = (quantise_w4_values(weight.float(), group) for weight in weights(r, 4, 16, 8))
    args = r(12, 16), torch.tensor((3, 0, 5, 1)), pack_w4(wide), wide_scale, pack_w4(narrow), narrow_scale
    return Example(args, rows_of_experts)


def sorting(r: Draw, local: int, quantise: bool) -> Example:
    """Defined are as many rows as the counts say, and their scales where they are rounded."""

    def live(results: list[torch.Tensor]) -> list[torch.Tensor]:
        rows, scale, counts, index = results
        count = int(counts.sum())
        assert 0 < count == (18 if local == 9 else count)
        return [rows[:count], *([scale[:count]] if quantise else []), counts, index]

    return Example((r(6, 7), r.choices(6, 3, 9), local, 9, quantise), live)


def local_experts(r: Draw, count: int) -> Example:
    gate_up, down = weights(r, count, 6, 4)
    ids = r.choices(5, 3, 9)
    ids[0, 0], ids[1, 1] = -1, 1000
    return Example((r(5, 6), r.f32(5, 3).abs(), ids, gate_up.transpose(1, 2).unflatten(1, (2, 4)), down.transpose(1, 2)))


def zero_row(x: torch.Tensor) -> torch.Tensor:
    """Its scale is zero."""
    x[2] = 0
    return x


def static(r: Draw) -> Example:
    weight = quantise_w8(r.f32(16, 6))
    return Example((r(5, 16), *weight, ints(3, 1, -4, 1, 5, -9), torch.tensor([0.05]), torch.tensor([3.0])), tolerance=ROUNDED)


def beside_floats(r: Draw) -> Example:
    values, scale = quantise_w4_values(r.f32(16, 8), 4)
    return Example((r(5, 16), pack_w4(values), scale))


def grouped_route(r: Draw, groups: int, top_groups: int, renormalise: bool) -> Example:
    return Example((r.f32(9, 12), r.f32(12), 3, groups, top_groups, renormalise, 2.5))


THREE = ["GroupedMatmul", "SwiGlu", "GroupedMatmul"]
QUANTISED = ["GroupedMatmul", "DequantSwigluQuant", "GroupedMatmul"]
# Primitive, operands, and operators in GE beside those of single elements.
EXAMPLES: list[tuple[str, Callable[[Draw], Example], list[str]]] = [
    ("quant_linear", lambda r: Example((zero_row(r(5, 16)), *quantise_w8(r.f32(16, 6)))), ["DynamicQuant", "QuantBatchMatmulV3"]),
    (
        "quant_linear_biased",
        lambda r: Example((zero_row(r(5, 16)), *quantise_w8(r.f32(16, 6)), r(6))),
        ["DynamicQuant", "QuantBatchMatmulV3"],
    ),
    ("static_quant_linear", static, ["AscendQuantV2", "QuantBatchMatmulV3"]),
    ("quant_linear_w4a8", lambda r: Example((r(5, 16), *quantise_w4(r.f32(16, 8))), tolerance=ROUNDED), ["DynamicQuant", "GroupedMatmul"]),
    ("weight_quant_linear", beside_floats, ["WeightQuantBatchMatmulV2"]),
    ("moe_route", lambda r: Example((r(5, 9), 3, True)), ["MoeGatingTopKSoftmaxV2"]),
    ("moe_route", lambda r: Example((r(5, 9), 3, False)), ["MoeGatingTopKSoftmaxV2"]),
    ("moe_route_grouped", lambda r: grouped_route(r, 4, 2, True), ["MoeGatingTopK"]),
    ("moe_route_grouped", lambda r: grouped_route(r, 1, 1, False), ["MoeGatingTopK"]),
    ("moe_sort", lambda r: sorting(r, 4, False), ["MoeInitRoutingV3"]),
    ("moe_sort", lambda r: sorting(r, 9, False), ["MoeInitRoutingV3"]),
    ("moe_sort", lambda r: sorting(r, 4, True), ["MoeInitRoutingV3"]),
    ("moe_unsort", lambda r: Example((poison(r(6, 5), 3, 4, 5), r.f32(3, 2).abs(), ints(-1, 2, -1, -1, 0, 1))), ["MoeFinalizeRoutingV2"]),
    ("grouped_experts", experts, THREE),
    ("grouped_experts_w8a8", lambda r: experts(r, quantise_w8), QUANTISED),
    ("grouped_experts_w4a8", lambda r: experts(r, quantise_w4), QUANTISED),
    ("grouped_experts_w4a16", lambda r: int4_beside_floats(r, 0), THREE),
    ("grouped_experts_w4a16", lambda r: int4_beside_floats(r, 4), THREE),
    ("grouped_experts_w4a16", lambda r: int4_beside_floats(r, 8), THREE),
    ("moe_experts", lambda r: local_experts(r, 4), ["MoeInitRoutingV3", *THREE, "MoeFinalizeRoutingV2"]),
    ("moe_experts", lambda r: local_experts(r, 9), ["MoeInitRoutingV3", *THREE, "MoeFinalizeRoutingV2"]),
]


def dispatched(r: Draw, quantise: bool) -> tuple[Any, ...]:
    x = r(5, 16)
    return x, r.choices(5, 3, 8), x, ints(0), 8, "world", 4, quantise


def combined(r: Draw, shared: int) -> tuple[Any, ...]:
    rows, assist = r(40, 16), ints(*[0] * 5120)
    return rows, r.choices(5, 3, 8), r.f32(5, 3), assist, ints(*[0] * 8), r(5, 16)[:shared], ints(0), 8, "world", 4, rows, False


# Primitive: operands, operators in GE, and whether another one adds the shared expert on older platforms.
EXCHANGES: dict[str, tuple[Callable[[Draw], tuple[Any, ...]], list[str], bool]] = {
    "moe_dispatch": (lambda r: dispatched(r, False), ["MoeDistributeDispatchV2"], False),
    "moe_dispatch int8": (lambda r: dispatched(r, True), ["MoeDistributeDispatchV2"], False),
    "moe_combine": (lambda r: combined(r, 5), ["MoeDistributeCombineV2"], True),
    "moe_combine without shared": (lambda r: combined(r, 0), ["MoeDistributeCombineV2"], False),
}
CONVERSIONS: list[tuple[str, Callable[[Draw], tuple[Any, ...]], list[str]]] = [
    *((name, lambda r, example=example: example(r).args, emitted) for name, example, emitted in EXAMPLES),
    *((name.split()[0], example, emitted) for name, (example, emitted, _) in EXCHANGES.items()),
]
FUSED = {"grouped_experts_w8a8", "grouped_experts_w4a8"}


def test_every_primitive_of_experts_and_of_quantised_weights_is_here() -> None:
    own = {name for name, primitive in TABLE.items() if primitive.has("lowering:npu")}
    starts = ("moe_", "grouped_", "quant_linear", "static_quant_linear", "weight_quant_linear")
    assert {name for name in own if name.startswith(starts)} == {name for name, *_ in CONVERSIONS}


@FEATURES
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("name", "example", "_"), EXAMPLES)
def test_lowering_is_the_reference(
    name: str, example: Callable[[Draw], Example], _: Any, dtype: torch.dtype, features: frozenset[str]
) -> None:
    if features and name not in FUSED:
        assert TABLE[name].lower_for("npu", features) == TABLE[name].lower_for("npu", frozenset())
        return
    lowerings.compare(TABLE[name], example(Draw(dtype)), dtype, *features)


@pytest.mark.parametrize(("name", "example", "emitted"), CONVERSIONS)
def test_torchair_converts(ta: Torchair, name: str, example: Callable[[Draw], tuple[Any, ...]], emitted: list[str]) -> None:
    assert lowerings.special(lowerings.converted(ta, TABLE[name], example(Draw(BF16)))) == emitted


@pytest.mark.parametrize("name", sorted(FUSED))
def test_newer_platforms_fuse_a_product_with_its_activation(ta: Torchair, name: str) -> None:
    args = next(example for primitive, example, _ in EXAMPLES if primitive == name)(Draw(BF16)).args
    fused = ["GroupedMatmulSwigluQuantV2", "GroupedMatmul"]
    assert lowerings.special(lowerings.converted(ta, TABLE[name], args, NEWEST)) == fused


@pytest.mark.parametrize("name", EXCHANGES)
def test_newer_platforms_name_an_algorithm_and_add_the_shared_expert(ta: Torchair, name: str) -> None:
    args, emitted, adds = EXCHANGES[name]
    for features, added, algorithm in ((frozenset(), adds, b""), (NEWEST, False, b"fullmesh_v2")):
        operators = list(lowerings.converted(ta, TABLE[name.split()[0]], args(Draw(BF16)), features).graph.op)
        assert {op.attr["comm_alg"].s for op in operators if op.type == emitted[0]} == {algorithm}
        assert ("Add" in [op.type for op in operators]) == added


@FEATURES
@pytest.mark.parametrize("name", sorted(FUSED))
def test_products_have_the_types_of_their_definitions(ta: Torchair, name: str, features: frozenset[str]) -> None:
    """int4 weights beside uint64 scales and f32 corrections; int8 weights beside f32 scales, with an absent bias of the right type."""
    args = next(example for primitive, example, _ in EXAMPLES if primitive == name)(Draw(BF16)).args
    ops_by_name = {op.name: op for op in lowerings.converted(ta, TABLE[name], args, features).graph.op}
    types = ta.torchair.ge._ge_graph.DataType

    def dtype(op: Any, slot: str) -> int | None:
        tensor = next((t for t, desc in zip(op.input, op.input_desc, strict=False) if desc.name == slot), None)
        producer = ops_by_name[tensor.rpartition(":")[0]] if tensor else None
        if producer is not None and producer.type == "Fill":
            return number(ops_by_name[producer.input[1].rpartition(":")[0]].attr["dst_type"])
        return number(producer.attr["type"]) if producer is not None and producer.type == "Bitcast" else None

    def number(attribute: Any) -> int:
        return int(getattr(attribute, attribute.WhichOneof("value")))

    products = [op for op in ops_by_name.values() if op.type.startswith("GroupedMatmul")]
    assert len(products) == 2
    if name.endswith("w4a8"):
        assert [dtype(op, "weight0") for op in products] == [types.DT_INT4] * 2
        assert {dtype(op, slot) for op in products for slot in ("scale0", "weight_scale0")} <= {types.DT_UINT64, None}
    else:
        assert dtype(products[1], "bias0") == types.DT_BF16
        assert dtype(products[0], "bias0") in (types.DT_INT32, None)


@pytest.mark.parametrize(("name", "example", "_"), CONVERSIONS)
def test_meta_kernels_agree_on_shapes(name: str, example: Callable[[Draw], tuple[Any, ...]], _: Any) -> None:
    """Results of the NPU operators' Meta kernels have the shapes and dtypes of the primitive."""
    args = example(Draw(BF16))
    with FakeTensorMode():
        graph, _ = lowerings.traced(TABLE[name], args)
    (returned,) = graph.graph.output_node().args
    want = lowerings.flat(TABLE[name].rule("abstract")(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)))
    assert [(n.meta["val"].shape, n.meta["val"].dtype) for n in returned] == [(t.shape, t.dtype) for t in want]


@pytest.mark.parametrize("count", [4, 9])
def test_ids_of_other_ranks_experts_are_below_the_kernels_bound(count: int) -> None:
    with FakeTensorMode():
        graph, _ = lowerings.traced(ops.moe_experts, local_experts(Draw(F32), count).args)
    (sort,) = (node for node in graph.graph.nodes if "init_routing" in str(node.target))
    assert sort.kwargs["expert_num"] == count + 1


# --- exchange ---


class Network:
    """Tokens of several ranks, and the experts that are sharded over them."""

    def __init__(self, ranks: int, chosen: int = 3, experts: int = 8) -> None:
        r, self.ranks, self.experts, self.F = Draw(F32), ranks, experts, 8
        self.gate_up, self.down = weights(r, experts, 16, self.F)
        self.x = [r(4, 16) for _ in range(ranks)]
        self.ids = [r.choices(4, chosen, experts) for _ in range(ranks)]
        self.share = [r(4, chosen).abs() for _ in range(ranks)]

    def dispatch(self, quantise: bool) -> list[tuple[Any, ...]]:
        return [(self.x[r], self.ids[r], self.x[r], ints(r), self.experts, "world", self.ranks, quantise) for r in range(self.ranks)]

    def combine(self, rows: list[torch.Tensor], sent: list[tuple[Any, ...]], quantise: bool = False) -> list[tuple[Any, ...]]:
        tail = (self.experts, "world", self.ranks)
        return [
            (rows[r], self.ids[r], self.share[r], *sent[r][3:], self.x[r], ints(r), *tail, rows[r], quantise) for r in range(self.ranks)
        ]

    def own(self, r: int) -> tuple[torch.Tensor, torch.Tensor]:
        local = self.experts // self.ranks
        return self.gate_up[r * local : (r + 1) * local], self.down[r * local : (r + 1) * local]

    def alone(self) -> list[torch.Tensor]:
        """Results of one device with all experts for the same tokens."""
        gate_up = self.gate_up.transpose(1, 2).unflatten(1, (2, self.F))
        down = self.down.transpose(1, 2)
        return [ops.moe_experts(x, share, ids, gate_up, down) + x for x, share, ids in zip(self.x, self.share, self.ids, strict=True)]


class _Collected(Exception):
    """The operands of a group's operator are known."""


def by_kernels(primitive: Primitive, calls: list[tuple[Any, ...]], features: frozenset[str] = frozenset()) -> list[Any]:
    """Runs the lowering's only NPU operator for all ranks of the group, and the rest of their graphs around it."""
    with FakeTensorMode():
        graphs = [lowerings.traced(primitive, args, features=features)[0] for args in calls]
    collected: list[Any] = []

    class Collect(torch.fx.Interpreter):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "npu":
                collected.append((str(target), (args, kwargs)))
                raise _Collected
            return super().call_function(target, args, kwargs)

    for graph, args in zip(graphs, calls, strict=True):
        with contextlib.suppress(_Collected):
            Collect(graph).run(*lowerings.tensors(args))
    ((name, _), *_) = collected
    together = iter(GROUP_KERNELS[name]([call for _, call in collected]))

    class Replay(Collect):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "npu":
                return next(together)
            return super().call_function(target, args, kwargs)

    return [Replay(graph).run(*lowerings.tensors(args)) for graph, args in zip(graphs, calls, strict=True)]


def test_exchange_names_a_group_that_no_other_operator_uses() -> None:
    for name in ("moe_dispatch", "moe_combine"):
        args = EXCHANGES[name][0](Draw(BF16))
        with FakeTensorMode():
            graph, _ = lowerings.traced(TABLE[name], args)
        (node,) = [node for node in graph.graph.nodes if str(node.target).startswith("npu.")]
        assert "dispatch" in node.args
        with pytest.raises(PrimitiveError, match="expert dispatch is over group 'tp'; on NPUs legal is 'world'"):
            TABLE[name].lower_for("npu", frozenset())(*("tp" if arg == "world" else arg for arg in args))


@pytest.mark.parametrize("chosen", [1, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_on_many_devices_are_those_on_one(ranks: int, chosen: int) -> None:
    net = Network(ranks, chosen)
    sent = ops.moe_dispatch.rule("group_reference")(net.dispatch(False))
    rows = [ops.grouped_experts(s[0], s[2], *net.own(r)) for r, s in enumerate(sent)]
    assert sum(int(s[2].sum()) for s in sent) == ranks * 4 * chosen
    combined = ops.moe_combine.rule("group_reference")(net.combine(rows, sent))
    for got, want in zip(combined, net.alone(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dispatch_kernel_is_the_reference_up_to_the_rows_that_count(ranks: int, quantise: bool) -> None:
    net = Network(ranks)
    calls = net.dispatch(quantise)
    for got, want in zip(by_kernels(ops.moe_dispatch, calls), ops.moe_dispatch.rule("group_reference")(calls), strict=True):
        live = int(want[2].sum())
        assert torch.equal(got[2], want[2])
        # The kernel multiplies by a reciprocal where the reference divides.
        assert (got[0][:live].float() - want[0][:live].float()).abs().max() <= (1 if quantise else 0)
        if quantise:
            torch.testing.assert_close(got[1][:live], want[1][:live], rtol=1e-6, atol=0)
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@FEATURES
def test_both_kernels_together_are_one_device(ranks: int, features: frozenset[str]) -> None:
    net = Network(ranks)
    sent = by_kernels(ops.moe_dispatch, net.dispatch(False), features)
    rows = [ops.grouped_experts(s[0], s[2], *net.own(r)) for r, s in enumerate(sent)]
    for (got,), want in zip(by_kernels(ops.moe_combine, net.combine(rows, sent), features), net.alone(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_may_come_back_as_int8(ranks: int) -> None:
    """Within a half of 1/127 of the largest of eight values, and by the attribute of the kernel of an Atlas A3 alone."""
    net = Network(ranks)
    sent = ops.moe_dispatch.rule("group_reference")(net.dispatch(False))
    rows = [ops.grouped_experts(s[0], s[2], *net.own(r)) for r, s in enumerate(sent)]
    calls = net.combine(rows, sent, quantise=True)
    floats = ops.moe_combine.rule("group_reference")(net.combine(rows, sent))
    wants = ops.moe_combine.rule("group_reference")(calls)
    for (got,), want, plain, share in zip(by_kernels(ops.moe_combine, calls, NEWEST), wants, floats, net.share, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert not torch.equal(want, plain)
        largest = max(float(own[own.isfinite()].abs().max()) for own in rows)
        assert (want - plain).abs().max() <= float(share.sum(-1).max()) * largest * 0.51 / 127
    with pytest.raises(PrimitiveError, match="moe_combine is to send int8; legal is that on an Atlas A3"):
        by_kernels(ops.moe_combine, calls, frozenset({"ge", "ascend910b"}))


def test_dispatch_gives_the_smallest_static_room() -> None:
    net = Network(4, chosen=5)
    for rows, *_ in ops.moe_dispatch.rule("group_reference")(net.dispatch(False)):
        assert rows.shape == (4 * 4 * 2, 16)
