"""Lowerings of the expert primitives for GE compute what their references compute, and torchair converts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs import ops
from npucompile.graphs.errors import PrimitiveError
from npucompile.graphs.primitive import Primitive
from npucompile.graphs.quantise import pack_w4, quantise_rows, quantise_w4, quantise_w4_values, quantise_w8
from npucompile.lowering.ascend import moe_converters
from npucompile.lowering.ascend.operators.table import GROUP_KERNELS, KERNELS
from npucompile.lowering.ascend.toolchain import harness
from npucompile.lowering.platform import Platform

BF16, F32 = torch.bfloat16, torch.float32
Args = tuple[Any, ...]
NEWEST = Platform("ascend910_93", "9.1").features("ge")
FEATURES = pytest.mark.parametrize("features", [frozenset(), NEWEST], ids=["any", "newest"])


@pytest.fixture(scope="module")
def torchair(tmp_path_factory: pytest.TempPathFactory) -> harness.Torchair:
    return harness.load(tmp_path_factory.mktemp("stubs"))


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lowered(primitive: Primitive, args: Args, features: frozenset[str] = frozenset()) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The lowering traced on meta tensors: its graph, which takes the tensors of args and returns a tuple."""
    with FakeTensorMode():
        metas = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") for a in args if isinstance(a, torch.Tensor)]

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rest = iter(tensors)
            out = primitive.lower_for("npu", features)(*(next(rest) if isinstance(a, torch.Tensor) else a for a in args))
            return out if isinstance(out, tuple) else (out,)

        return make_fx(run)(*metas), metas


class OnCpu(torch.fx.Interpreter):
    """Runs NPU operators by their CPU kernels; refuses those over a group, which need all its ranks."""

    def call_function(self, target: Any, args: Args, kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "npu":
            return KERNELS[str(target)](*args, **kwargs)
        # Constants were recorded on `meta`.
        kwargs = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
        return super().call_function(target, args, kwargs)


def tensors(args: Args) -> list[torch.Tensor]:
    # Cloned, because int4 kernels overwrite their rows.
    return [a.clone() for a in args if isinstance(a, torch.Tensor)]


def on_cpu(primitive: Primitive, args: Args, features: frozenset[str] = frozenset()) -> tuple[torch.Tensor, ...]:
    graph, _ = lowered(primitive, args, features)
    results: tuple[torch.Tensor, ...] = OnCpu(graph).run(*tensors(args))
    return results


def reference(primitive: Primitive, args: Args) -> tuple[torch.Tensor, ...]:
    out = primitive.rule("reference")(*args)
    return out if isinstance(out, tuple) else (out,)


def converted(torchair: harness.Torchair, primitive: Primitive, args: Args, features: frozenset[str] = frozenset()) -> list[Any]:
    """The GE operators of the converted lowering."""
    moe_converters.register(torchair)
    graph, metas = lowered(primitive, args, features)
    with metas[0].fake_mode:
        runner = torchair.get_compiler(torchair.CompilerConfig())(graph, metas).runner
    return list(runner.graph.op)


def ge_ops(torchair: harness.Torchair, primitive: Primitive, args: Args, features: frozenset[str] = frozenset()) -> list[str]:
    """Types of the GE operators of the converted lowering, without those that only reshape or fill operands."""
    glue = {
        "Data",
        "Const",
        "Cast",
        "Fill",
        "NetOutput",
        "Reshape",
        "Bitcast",
        "Unsqueeze",
        "Identity",
        "Shape",
        "ConcatV2",
        "Mul",
        "Transpose",
    }
    return [op.type for op in converted(torchair, primitive, args, features) if op.type not in glue]


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def choices(tokens: int, chosen: int, experts: int, seed: int = 0) -> torch.Tensor:
    """[tokens, chosen] ids of experts, distinct for each token."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[:, :chosen].int()


def weights(E: int, M: int, F: int, dtype: torch.dtype = F32) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(E, M, 2 * F, dtype=dtype, seed=1) * M**-0.5, draw(E, F, M, dtype=dtype, seed=2) * F**-0.5


def experts_args(quantise: Callable[..., Any] | None, dtype: torch.dtype, counts: tuple[int, ...] = (3, 0, 5, 1)) -> Args:
    """Operands of grouped products over 12 rows, 16 wide."""
    gate_up, down = weights(len(counts), 16, 8, dtype)
    rows = draw(12, 16, dtype=dtype)
    if quantise is None:
        return rows, torch.tensor(counts), gate_up, down
    return *quantise_rows(rows), torch.tensor(counts), *quantise(gate_up), *quantise(down), dtype


def int4_beside_floats(dtype: torch.dtype, group: int = 0) -> Args:
    """As `experts_args`, of int4 beside rows that are not rounded."""
    gate_up, down = weights(4, 16, 8, F32)
    (wide, wide_scale), (narrow, narrow_scale) = quantise_w4_values(gate_up, group), quantise_w4_values(down, group)
    return draw(12, 16, dtype=dtype), torch.tensor((3, 0, 5, 1)), pack_w4(wide), wide_scale, pack_w4(narrow), narrow_scale


# --- each lowering is its reference ---


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.usefixtures("torchair")
def test_quant_linear(dtype: torch.dtype) -> None:
    x = draw(5, 16, dtype=dtype)
    x[2] = 0
    args = (x, *quantise_w8(draw(16, 6, seed=1)))
    (got,), (want,) = on_cpu(ops.quant_linear, args), reference(ops.quant_linear, args)
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype is F32 else 8e-3, atol=1e-6)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.usefixtures("torchair")
def test_moe_route(dtype: torch.dtype, renormalise: bool) -> None:
    args = (draw(5, 9, dtype=dtype), 3, renormalise)
    (got, got_ids), (want, want_ids) = on_cpu(ops.moe_route, args), reference(ops.moe_route, args)
    assert torch.equal(got_ids, want_ids)
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype is F32 else 8e-3, atol=1e-6)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (1, 1)])
@pytest.mark.usefixtures("torchair")
def test_moe_route_grouped(groups: int, top_groups: int, renormalise: bool) -> None:
    args = (draw(9, 12, dtype=BF16), draw(12, seed=1, dtype=F32), 3, groups, top_groups, renormalise, 2.5)
    (got, got_ids), (want, want_ids) = on_cpu(ops.moe_route_grouped, args), reference(ops.moe_route_grouped, args)
    assert torch.equal(got_ids, want_ids)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("num_local", [4, 9], ids=["some", "all"])
@pytest.mark.usefixtures("torchair")
def test_moe_sort_up_to_the_rows_that_count(num_local: int, quantise: bool) -> None:
    args = (draw(6, 7, dtype=BF16), choices(6, 3, 9), num_local, 9, quantise)
    got, want = on_cpu(ops.moe_sort, args), reference(ops.moe_sort, args)
    live = int(want[2].sum())
    assert 0 < live == (18 if num_local == 9 else live)
    assert torch.equal(got[0][:live], want[0][:live])
    assert torch.equal(got[1][:live], want[1][:live]) or not quantise
    assert torch.equal(got[2], want[2])
    assert torch.equal(got[3], want[3])
    assert [t.dtype for t in got] == [t.dtype for t in want]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.usefixtures("torchair")
def test_moe_unsort_skips_what_is_elsewhere(dtype: torch.dtype) -> None:
    rows = draw(6, 5, dtype=dtype)
    rows[3:] = float("nan")
    args = (rows, draw(3, 2, seed=1).abs(), ints(-1, 2, -1, -1, 0, 1))
    (got,), (want,) = on_cpu(ops.moe_unsort, args), reference(ops.moe_unsort, args)
    assert want.isfinite().all()
    torch.testing.assert_close(got, want, rtol=1e-6 if dtype is F32 else 2e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.usefixtures("torchair")
def test_grouped_experts(dtype: torch.dtype) -> None:
    args = experts_args(None, dtype)
    (got,), (want,) = on_cpu(ops.grouped_experts, args), reference(ops.grouped_experts, args)
    torch.testing.assert_close(got[:9], want[:9], rtol=1e-5 if dtype is F32 else 2e-2, atol=1e-6 if dtype is F32 else 2e-2)
    assert want[:9].any(1).all()
    assert not want[9:].any()


@pytest.mark.parametrize("form", [(ops.grouped_experts_w8a8, quantise_w8), (ops.grouped_experts_w4a8, quantise_w4)], ids=["w8a8", "w4a8"])
@FEATURES
@pytest.mark.usefixtures("torchair")
def test_quantised_experts(form: tuple[Primitive, Callable[..., Any]], features: frozenset[str]) -> None:
    primitive, quantise = form
    args = experts_args(quantise, F32)
    (got,), (want,) = on_cpu(primitive, args, features), reference(primitive, args)
    torch.testing.assert_close(got[:9], want[:9], rtol=1e-4, atol=1e-5)
    assert not want[9:].any()
    (got,) = on_cpu(primitive, experts_args(quantise, BF16), features)
    assert got.dtype is BF16


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("group", [0, 4, 8])
@pytest.mark.usefixtures("torchair")
def test_experts_in_int4_beside_floats(dtype: torch.dtype, group: int) -> None:
    args = int4_beside_floats(dtype, group)
    (got,), (want,) = on_cpu(ops.grouped_experts_w4a16, args), reference(ops.grouped_experts_w4a16, args)
    torch.testing.assert_close(got[:9], want[:9], rtol=1e-5 if dtype is F32 else 2e-2, atol=1e-5 if dtype is F32 else 1e-2)


@pytest.mark.parametrize("experts", [4, 9], ids=["some", "all"])
@pytest.mark.usefixtures("torchair")
def test_moe_experts_of_this_device(experts: int) -> None:
    gate_up, down = weights(experts, 6, 4)
    ids = choices(5, 3, 9)
    ids[0, 0], ids[1, 1] = -1, 1000
    args = (draw(5, 6), draw(5, 3, seed=3).abs(), ids, gate_up.transpose(1, 2).unflatten(1, (2, 4)), down.transpose(1, 2))
    (got,), (want,) = on_cpu(ops.moe_experts, args), reference(ops.moe_experts, args)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    (sort,) = (node for node in lowered(ops.moe_experts, args)[0].graph.nodes if "init_routing" in str(node.target))
    assert sort.kwargs["expert_num"] == experts + 1  # upper bound of the kernel's ids, including the one for other ranks' experts


# --- converted by torchair ---

INT4, INT4_SCALE = quantise_w4_values(draw(16, 8, seed=1), 4)
EXPERTS_BF16, X_BF16 = experts_args(None, BF16), draw(5, 16, dtype=BF16)
CONVERSIONS: dict[str, tuple[Primitive, Args, list[str]]] = {
    "quant_linear": (
        ops.quant_linear,
        (draw(5, 16, dtype=BF16), *quantise_w8(draw(16, 6))),
        ["DynamicQuant", "QuantBatchMatmulV3"],
    ),
    "static_quant_linear": (
        ops.static_quant_linear,
        (draw(5, 16, dtype=BF16), *quantise_w8(draw(16, 6)), ints(3, 1, -4, 1, 5, -9), torch.tensor([0.05]), torch.tensor([3.0])),
        ["Reciprocal", "AscendQuantV2", "QuantBatchMatmulV3"],
    ),
    "quant_linear_w4a8": (
        ops.quant_linear_w4a8,
        (draw(5, 16, dtype=BF16), *quantise_w4(draw(16, 8, seed=1))),
        ["DynamicQuant", "GroupedMatmul"],
    ),
    "weight_quant_linear": (
        ops.weight_quant_linear,
        (draw(5, 16, dtype=BF16), pack_w4(INT4), INT4_SCALE),
        ["WeightQuantBatchMatmulV2"],
    ),
    "swiglu": (ops.swiglu, (draw(5, 16, dtype=BF16),), ["SwiGlu"]),
    "moe_route": (ops.moe_route, (draw(5, 9, dtype=BF16), 3, True), ["MoeGatingTopKSoftmaxV2"]),
    "moe_route_grouped": (
        ops.moe_route_grouped,
        (draw(9, 12, dtype=F32), draw(12, seed=1, dtype=F32), 3, 4, 2, True, 2.5),
        ["MoeGatingTopK"],
    ),
    "moe_sort": (ops.moe_sort, (draw(5, 16, dtype=BF16), choices(5, 3, 9), 4, 9, False), ["MoeInitRoutingV3"]),
    "moe_sort int8": (ops.moe_sort, (draw(5, 16, dtype=BF16), choices(5, 3, 9), 4, 9, True), ["MoeInitRoutingV3"]),
    "moe_unsort": (
        ops.moe_unsort,
        (draw(6, 16, dtype=BF16), draw(3, 2), ints(-1, 2, -1, -1, 0, 1)),
        ["MoeFinalizeRoutingV2"],
    ),
    "grouped_experts": (ops.grouped_experts, EXPERTS_BF16, ["GroupedMatmul", "SwiGlu", "GroupedMatmul"]),
    "grouped_experts_w8a8": (
        ops.grouped_experts_w8a8,
        experts_args(quantise_w8, BF16),
        ["GroupedMatmul", "DequantSwigluQuant", "GroupedMatmul"],
    ),
    "grouped_experts_w4a16": (ops.grouped_experts_w4a16, int4_beside_floats(BF16), ["GroupedMatmul", "SwiGlu", "GroupedMatmul"]),
    "grouped_experts_w4a16 in groups": (
        ops.grouped_experts_w4a16,
        int4_beside_floats(BF16, 4),
        ["GroupedMatmul", "SwiGlu", "GroupedMatmul"],
    ),
    "grouped_experts_w4a8": (
        ops.grouped_experts_w4a8,
        experts_args(quantise_w4, BF16),
        ["GroupedMatmul", "DequantSwigluQuant", "GroupedMatmul"],
    ),
    "moe_dispatch": (
        ops.moe_dispatch,
        (X_BF16, choices(5, 3, 8), X_BF16, ints(0), 8, "world", 4, False),
        ["MoeDistributeDispatchV2"],
    ),
    "moe_dispatch int8": (
        ops.moe_dispatch,
        (X_BF16, choices(5, 3, 8), X_BF16, ints(0), 8, "world", 4, True),
        ["MoeDistributeDispatchV2"],
    ),
    "moe_combine": (
        ops.moe_combine,
        (draw(40, 16, dtype=BF16), choices(5, 3, 8), draw(5, 3), ints(*[0] * 5120), ints(*[0] * 8), X_BF16, ints(0), 8, "world", 4),
        ["MoeDistributeCombineV2", "Add"],
    ),
    "moe_combine without shared": (
        ops.moe_combine,
        (draw(40, 16, dtype=BF16), choices(5, 3, 8), draw(5, 3), ints(*[0] * 5120), ints(*[0] * 8), X_BF16[:0], ints(0), 8, "world", 4),
        ["MoeDistributeCombineV2"],
    ),
    "moe_experts": (
        ops.moe_experts,
        (draw(5, 6, dtype=BF16), draw(5, 3), choices(5, 3, 9), draw(4, 2, 4, 6, dtype=BF16), draw(4, 6, 4, dtype=BF16)),
        [
            *("Less", "GreaterEqual", "LogicalOr", "MaskedFill"),
            *("MoeInitRoutingV3", "GroupedMatmul", "SwiGlu", "GroupedMatmul", "MoeFinalizeRoutingV2"),
        ],
    ),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_torchair_converts(torchair: harness.Torchair, name: str) -> None:
    primitive, args, wanted = CONVERSIONS[name]
    assert ge_ops(torchair, primitive, args) == wanted


FUSED = {
    "grouped_experts_w8a8": ["GroupedMatmulSwigluQuantV2", "GroupedMatmul"],
    "grouped_experts_w4a8": ["GroupedMatmulSwigluQuantV2", "GroupedMatmul"],
    "moe_dispatch": ["MoeDistributeDispatchV2"],
    "moe_combine": ["MoeDistributeCombineV2"],
    "moe_combine without shared": ["MoeDistributeCombineV2"],
}


@pytest.mark.parametrize("name", FUSED)
def test_newer_platforms_take_fewer_operators(torchair: harness.Torchair, name: str) -> None:
    primitive, args, _ = CONVERSIONS[name]
    assert ge_ops(torchair, primitive, args, NEWEST) == FUSED[name]
    algorithms = {op.attr["comm_alg"].s for op in converted(torchair, primitive, args, NEWEST) if "comm_alg" in op.attr}
    assert algorithms == ({b"fullmesh_v2"} if name.startswith("moe") else set())


@FEATURES
@pytest.mark.parametrize("name", ["grouped_experts_w8a8", "grouped_experts_w4a8"])
def test_products_have_the_types_of_their_definitions(torchair: harness.Torchair, name: str, features: frozenset[str]) -> None:
    """int4 weights beside uint64 scales and f32 corrections; int8 weights beside f32 scales, with an absent bias of the right type."""
    primitive, args, _ = CONVERSIONS[name]
    ops_by_name = {op.name: op for op in converted(torchair, primitive, args, features)}
    types = torchair.torchair.ge._ge_graph.DataType

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


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.usefixtures("torchair")
def test_meta_kernels_agree_on_shapes(name: str) -> None:
    """Results of the NPU operators' Meta kernels have the shapes and dtypes of the primitive."""
    primitive, args, _ = CONVERSIONS[name]
    graph, _ = lowered(primitive, args)
    (returned,) = next(node for node in graph.graph.nodes if node.op == "output").args
    want = primitive.rule("abstract")(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
    want = want if isinstance(want, tuple) else (want,)
    assert [(n.meta["val"].shape, n.meta["val"].dtype) for n in returned] == [(t.shape, t.dtype) for t in want]


# --- exchange ---


class Network:
    """Tokens of several ranks, and the experts that are sharded over them."""

    def __init__(self, ranks: int, chosen: int = 3, experts: int = 8, dtype: torch.dtype = F32) -> None:
        self.ranks, self.experts, self.M, self.F, self.dtype = ranks, experts, 16, 8, dtype
        self.gate_up, self.down = weights(experts, self.M, self.F, dtype)
        self.x = [draw(4, self.M, dtype=dtype, seed=10 + r) for r in range(ranks)]
        self.ids = [choices(4, chosen, experts, seed=20 + r) for r in range(ranks)]
        self.share = [draw(4, chosen, seed=30 + r).abs() for r in range(ranks)]

    def dispatch(self, quantise: bool) -> list[Args]:
        return [(self.x[r], self.ids[r], self.x[r], ints(r), self.experts, "world", self.ranks, quantise) for r in range(self.ranks)]

    def combine(self, rows: list[torch.Tensor], sent: list[Args]) -> list[Args]:
        tail = (self.experts, "world", self.ranks)
        return [(rows[r], self.ids[r], self.share[r], *sent[r][3:], self.x[r], ints(r), *tail) for r in range(self.ranks)]

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


def by_kernels(primitive: Primitive, calls: list[Args], features: frozenset[str] = frozenset()) -> list[Any]:
    """Runs the lowering's only NPU operator for all ranks of the group, and the rest of their graphs around it."""
    graphs = [lowered(primitive, args, features)[0] for args in calls]
    collected: list[Any] = []

    class Collect(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Args, kwargs: dict[str, Any]) -> Any:
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "npu":
                collected.append((str(target), (args, kwargs)))
                raise _Collected
            return super().call_function(target, args, kwargs)

    for graph, args in zip(graphs, calls, strict=True):
        with contextlib.suppress(_Collected):
            Collect(graph).run(*tensors(args))
    ((name, _), *_) = collected
    together = iter(GROUP_KERNELS[name]([call for _, call in collected]))

    class Replay(Collect):
        def call_function(self, target: Any, args: Args, kwargs: dict[str, Any]) -> Any:
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "npu":
                return next(together)
            return super().call_function(target, args, kwargs)

    return [Replay(graph).run(*tensors(args)) for graph, args in zip(graphs, calls, strict=True)]


@pytest.mark.usefixtures("torchair")
def test_exchange_names_a_group_that_no_other_operator_uses() -> None:
    for name in ("moe_dispatch", "moe_combine"):
        primitive, args, _ = CONVERSIONS[name]
        assert "dispatch" in kernel_args(primitive, args)
        with pytest.raises(PrimitiveError, match="expert dispatch is over group 'tp'; on NPUs legal is 'world'"):
            lowered(primitive, tuple("tp" if arg == "world" else arg for arg in args))


def kernel_args(primitive: Primitive, args: Args) -> Args:
    (node,) = [node for node in lowered(primitive, args)[0].graph.nodes if str(node.target).startswith("npu.")]
    return tuple(node.args)


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


@pytest.mark.parametrize("ranks", [2, 4])
def test_int8_experts_on_many_devices_are_near_those_on_one(ranks: int) -> None:
    net = Network(ranks)
    sent = ops.moe_dispatch.rule("group_reference")(net.dispatch(True))
    packed = [quantise_w8(w) for w in (net.gate_up, net.down)]
    local = net.experts // ranks
    rows = []
    for r, (rows8, scale, counts, *_) in enumerate(sent):
        own = [part[r * local : (r + 1) * local] for pair in packed for part in pair]
        rows.append(ops.grouped_experts_w8a8(rows8, scale, counts, *own, F32))
    for got, want in zip(ops.moe_combine.rule("group_reference")(net.combine(rows, sent)), net.alone(), strict=True):
        assert ((got - want).norm() / want.norm()).item() < 0.02


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.usefixtures("torchair")
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
@pytest.mark.usefixtures("torchair")
def test_both_kernels_together_are_one_device(ranks: int, features: frozenset[str]) -> None:
    net = Network(ranks)
    sent = by_kernels(ops.moe_dispatch, net.dispatch(False), features)
    rows = [ops.grouped_experts(s[0], s[2], *net.own(r)) for r, s in enumerate(sent)]
    for (got,), want in zip(by_kernels(ops.moe_combine, net.combine(rows, sent), features), net.alone(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_dispatch_gives_the_smallest_static_room() -> None:
    net = Network(4, chosen=5)
    for rows, *_ in ops.moe_dispatch.rule("group_reference")(net.dispatch(False)):
        assert rows.shape == (4 * 4 * 2, 16)
