"""graphs/spmd/partition.py: the partitioner shards what the rules say, communicates where the model says, and refuses everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from npucompile.graphs import ops
from npucompile.graphs.errors import PartitionError
from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.spmd.layout import constrain
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.spmd.region import all_gather, shard_map
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Bucket, Function, Mesh, Program, Rules, Tree
from npucompile.lowering.ascend.emulator.interpreter import Interpreter

T, M, F, V = 4, 6, 10, 8
F32 = torch.float32
RULES = Rules.of({"ffn": "tp", "vocab": "tp", "slots": "tp"})


def program(forward: Callable[[Tree, Tree, Tree], Any], width: int = F) -> Program:
    params = {
        "up": Aval((width, M), F32, ("ffn", None)),
        "down": Aval((M, width), F32, (None, "ffn")),
        "head": Aval((V, M), F32, ("vocab", None)),
        "norm": Aval((M,), F32),
    }
    state = {"pool": Aval((2, 4, width, M), F32, (None, None, "ffn", None)), "seen": Aval((T,), torch.int32)}
    return Program("toy", Bucket("decode", T, 1), forward, params, state, {"x": Aval((T, M), F32)})


def mlp(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    """A column-parallel and a row-parallel matmul, and a head sharded over the vocabulary."""
    hidden = torch.nn.functional.silu(ops.linear(i["x"], p["up"]))
    down = constrain(ops.linear(hidden, p["down"]), None, None)
    x, stream = ops.add_rms_norm(down, i["x"], p["norm"], 1e-6, 1.0)
    logits = constrain(ops.linear(x, p["head"]), None, None)
    return {"logits": logits, "stream": stream}, {"pool": s["pool"] * 2, "seen": s["seen"] + 1}


def split(forward: Callable[[Tree, Tree, Tree], Any], mesh: str = "tp=2", rules: Rules = RULES, width: int = F) -> PartitionedProgram:
    return partition(trace(program(forward, width)), Mesh.parse(mesh), rules)


def operands(partitioned: PartitionedProgram) -> list[torch.Tensor]:
    r = torch.Generator().manual_seed(0)
    return [torch.randn(leaf.aval.shape, generator=r).to(leaf.aval.dtype) for leaf in partitioned.signature.operands]


# --- one device ---


def test_one_device_runs_the_traced_graph() -> None:
    traced = trace(program(mlp))
    single = partition(traced, Mesh(), Rules())
    assert single.collectives == ()
    assert single.graph is traced.graph
    assert single.signature == traced.signature
    values = operands(single)
    for got, want in zip(single.graph(*values), traced.graph(*values), strict=True):
        assert torch.equal(got, want)


# --- two devices ---


def test_the_text_of_two_devices(golden: Callable[[str, str], None]) -> None:
    golden("mlp_partitioned_tp2", as_text(split(mlp).graph, "mlp over tp=2"))


def test_partitioning_again_gives_the_same_graph() -> None:
    """Also after this process has partitioned for other meshes."""
    first = {mesh: as_text(split(mlp, mesh).graph, "") for mesh in ("tp=2", "dp=2,tp=2", "")}
    again = {mesh: as_text(split(mlp, mesh).graph, "") for mesh in ("", "dp=2,tp=2", "tp=2")}
    assert first == again


def test_every_rank_has_the_same_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as any rank, the graph is the same, so one graph serves all ranks."""
    start = dist.init_process_group
    partitions = []
    for rank in range(4):
        monkeypatch.setattr(dist, "init_process_group", lambda *args, rank=rank, **rest: start(*args, **{**rest, "rank": rank}))
        partitions.append(split(mlp, "dp=2,tp=2"))
    assert len({single.collectives for single in partitions}) == 1
    assert len({as_text(single.graph, "") for single in partitions}) == 1
    assert len({single.signature for single in partitions}) == 1


def at(*coords: int) -> torch.Tensor:
    return torch.tensor(coords, dtype=torch.int32)


# --- bodies ---


def half(scale: float, p: Tree, x: torch.Tensor) -> torch.Tensor:
    return constrain(ops.linear(torch.sigmoid(ops.linear(x, p["up"])), p["down"]), None, None) * scale


def two_blocks(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    x = block("layer", half, (0.5,), p, i["x"])
    return {"y": block("layer", half, (0.5,), p, x + 1)}, s


def test_a_layer_is_split_once_and_communicates_at_every_call() -> None:
    two = split(two_blocks)
    assert list(bodies(two.graph)) == ["layer"]
    assert two.collectives == (("all_reduce", "tp", "f32[4,6]"),) * 2
    flat = [n.args[-1] for n in bodies(two.graph)["layer"].graph.nodes if "all_reduce" in str(n.target)]
    assert flat == ["tp"], "the group in a body has its symbolic name"
    whole = split(two_blocks, "")
    up, down, *_, x = operands(whole)
    want, *_ = whole.graph(*operands(whole))
    runs = Interpreter(two.graph, two.mesh)([[up.chunk(2)[r], down.chunk(2, 1)[r], *operands(two)[2:-2], x, at(0, r)] for r in range(2)])
    for got, *_ in runs:
        torch.testing.assert_close(got, want)


# --- groups with requests of their own ---


def test_groups_do_not_communicate_without_a_region() -> None:
    """dp is a manual axis: sharding over tp is the same for every size of dp."""
    assert split(mlp, "dp=3,tp=2").collectives == split(mlp).collectives
    alone = split(mlp, "dp=3")
    assert alone.collectives == ()
    assert [leaf.aval for leaf in alone.signature.params] == [leaf.aval for leaf in split(mlp, "").signature.params]
    assert alone.signature.inputs[-1].name == "inputs.coords"


def test_experts_may_lie_on_all_devices() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        def local(w: torch.Tensor) -> torch.Tensor:
            return all_gather(w.sum((1, 2)), "experts")

        return {"y": shard_map(local, [(p["w"], ("experts", None, None))], (None,))}, s

    def toy(experts: int) -> Program:
        return replace(program(forward), params={"w": Aval((experts, 3, 5), F32, ("experts", None, None))})

    rules = Rules.of({"experts": ("dp", "tp")})
    partitions = partition(toy(8), Mesh.parse("dp=2,tp=2"), rules)
    assert [leaf.aval.shape for leaf in partitions.signature.params] == [(2, 3, 5)]
    assert partitions.collectives == (("all_gather_into_tensor", "world", "f32[8]"),)
    weights = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0))
    rest = operands(partitions)[1:-1]
    runs = Interpreter(partitions.graph, partitions.mesh)([[weights[2 * r : 2 * r + 2], *rest, at(r // 2, r % 2)] for r in range(4)])
    for y, *_ in runs:
        torch.testing.assert_close(y, weights.sum((1, 2)))
    with pytest.raises(PartitionError, match=r"params\.w: axis 'experts' of size 6 does not divide by 4 .* of mesh dp=2,tp=2"):
        partition(toy(6), Mesh.parse("dp=2,tp=2"), rules)


# --- functions, over axes of any names ---

LAYOUTS = [(None, None), ("a", None), (None, "a"), ("b", None), (None, "b"), ("both", None), (None, "both"), ("a", "b"), ("b", "a")]
BY_AXES = Rules.of({"a": "x", "b": "y", "both": ("x", "y")})


def function(f: Callable[..., Any], *avals: Aval) -> Program:
    return Program("f", Function("f"), lambda p, s, i: (f(*i), s), {}, {}, avals)


def on_all_ranks(split: PartitionedProgram, values: list[torch.Tensor], avals: tuple[Aval, ...]) -> torch.Tensor:
    """The output of a function, put together from those of all ranks, each of which is compared."""
    mesh, rules = split.mesh, split.rules
    shares = [
        [*(value[rules.local_slice(aval, mesh, r)] for value, aval in zip(values, avals, strict=True)), mesh.coords(r)]
        for r in range(mesh.size)
    ]
    results = [result for (result,) in Interpreter(split.graph, mesh)(shares)]
    (leaf,) = split.signature.outputs
    assert {tuple(result.shape) for result in results} == {leaf.aval.shape}
    sizes = zip(leaf.aval.shape, leaf.aval.axes, strict=True)
    whole = Aval(tuple(size * rules.num_shards(axis, mesh) for size, axis in sizes), leaf.aval.dtype, leaf.aval.axes)
    full = torch.full(whole.shape, float("nan"))
    for r, result in enumerate(results):
        full[rules.local_slice(whole, mesh, r)] = result
    assert all(torch.equal(full[rules.local_slice(whole, mesh, r)], result) for r, result in enumerate(results))
    return full


@pytest.mark.parametrize("before", LAYOUTS, ids=str)
def test_a_value_goes_from_any_layout_to_any_other(before: tuple[str | None, ...]) -> None:
    """Over two axes, of which both may split one dimension; each rank gets its own part, whichever rank traces."""
    aval = Aval((12, 6), F32, before)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    for after in LAYOUTS:
        moved = partition(function(lambda v, after=after: constrain(v * 2, *after) + 1, aval), Mesh.parse("x=2,y=3"), BY_AXES)
        assert moved.signature.outputs[0].aval.axes == after
        assert torch.equal(on_all_ranks(moved, [x], (aval,)), x * 2 + 1)


@pytest.mark.parametrize("summed", ["a", "b", "both"])
def test_addends_are_summed_into_any_layout(summed: str) -> None:
    avals = (Aval((12, 12), F32, (None, summed)), Aval((12, 6), F32, (summed, None)))
    values = [torch.randn(aval.shape, generator=torch.Generator().manual_seed(i)) for i, aval in enumerate(avals)]
    for after in LAYOUTS:
        moved = partition(function(lambda a, b, after=after: constrain(a @ b, *after), *avals), Mesh.parse("x=2,y=3"), BY_AXES)
        torch.testing.assert_close(on_all_ranks(moved, values, avals), values[0] @ values[1])


@pytest.mark.parametrize("mesh", ["x=2,y=2", "y=2", "x=4", "y=2,x=2"])
def test_a_function_is_split_over_axes_of_any_names(mesh: str) -> None:
    """Rows over one axis and the width over another: a sum along that alone, and no gather at the end."""

    def two_products(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return constrain(torch.nn.functional.silu(x @ up) @ down, "a", None)

    avals = (Aval((4, M), F32, ("a", None)), Aval((M, 8), F32, (None, "b")), Aval((8, M), F32, ("b", None)))
    values = [torch.randn(aval.shape, generator=torch.Generator().manual_seed(i)) for i, aval in enumerate(avals)]
    parts = partition(function(two_products, *avals), Mesh.parse(mesh), Rules.of({"a": "x", "b": "y"}))
    torch.testing.assert_close(on_all_ranks(parts, values, avals), two_products(*values))
    rows = 4 // parts.mesh.axis("x")
    assert parts.collectives == ((("all_reduce", "axis:y", f"f32[{rows},{M}]"),) if "y" in mesh else ())


def test_dp_is_an_axis_like_others_of_a_function() -> None:
    aval = Aval((4, M), F32, ("rows", None))
    parts = partition(function(lambda x: x.square(), aval), Mesh.parse("dp=2,tp=2"), Rules.of({"rows": ("dp", "tp")}))
    x = torch.randn(4, M)
    assert parts.signature.outputs[0].aval == Aval((1, M), F32, ("rows", None))
    assert torch.equal(on_all_ranks(parts, [x], (aval,)), x.square())


@pytest.mark.parametrize(
    ("f", "rules", "message"),
    [
        (lambda x: x.sum(), BY_AXES, r"f: outputs\. ends as \(Partial\(sum\), Replicate\(\)\); legal is whole, or split as the rules"),
        (lambda x: x.t().reshape(-1), BY_AXES, r"legal is whole, or split as the rules split an axis"),
        (lambda x: x, Rules.of({"a": ("y", "x")}), r"rule 'a' -> \('y', 'x'\): legal is the order of the mesh's axes, dp, tp, x, y"),
        (lambda x: constrain(x, "both", None), BY_AXES, r"axis 'both' of size 4 does not divide by 8"),
    ],
    ids=["a partial sum", "parts of rows", "another order", "a size"],
)
def test_what_no_layout_of_a_function_is_is_refused(f: Callable[..., Any], rules: Rules, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(function(f, Aval((4, 6), F32, ("a", None))), Mesh.parse("x=2,y=4"), rules)


# --- refusals ---


def test_an_unknown_mesh_axis_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"mesh ep=2,tp=2 has an axis 'ep'; legal are dp, tp"):
        split(mlp, "ep=2,tp=2")


def test_only_experts_may_be_split_over_groups() -> None:
    rules = Rules.of({"ffn": ("dp", "tp")})
    with pytest.raises(PartitionError, match=r"rule 'ffn' -> .*: 'dp' holds groups with requests of their own; legal over it is experts"):
        split(mlp, "dp=2", rules, width=12)
    assert split(mlp, "tp=2", rules).collectives, "one group has nobody to share with"


def test_a_name_that_no_group_has_is_refused() -> None:
    """A logical axis over all mesh axes uses the group `world`; over some axes in another order there is no group."""

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": shard_map(lambda x: all_gather(x, "experts"), [(i["x"], (None, None))], (None, None))}, s

    with pytest.raises(PartitionError, match=r"axis 'experts' is split over \('tp', 'dp'\); legal is one axis of mesh dp=2,tp=2"):
        split(forward, "dp=2,tp=2", Rules.of({"experts": ("tp", "dp")}))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda p, s, i: ({"y": ops.linear(i["x"], p["up"])}, s),
            r"outputs.y ends as \(Shard\(dim=1\),\), its layout must be \(Replicate\(\),\)",
        ),
        (lambda p, s, i: ({"y": ops.linear(i["x"], p["up"]).sum()}, s), r"toy: outputs.y ends as \(Partial\(sum\),\)"),
        (
            lambda p, s, i: ({}, {**s, "pool": constrain(s["pool"], None, None, None, None)}),
            r"toy: state.pool ends as \(Replicate\(\),\), its layout must be \(Shard\(dim=2\),\)",
        ),
    ],
)
def test_a_result_in_another_layout_is_refused(forward: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        split(forward)


def unasked(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    hidden = ops.linear(i["x"], p["up"])
    return {"y": torch.sort(hidden)[0]}, s


def unasked_by_a_primitive(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    hidden = ops.linear(i["x"], p["up"])
    return {"y": ops.embed(s["seen"], hidden)}, {**s, "seen": ops.moe_route(hidden, 1, True)[1].view(-1)}


def reduced_twice(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    down = ops.linear(ops.linear(i["x"], p["up"]), p["down"])
    return {"y": constrain(torch.relu(down), None, None)}, s


@pytest.mark.parametrize("forward", [unasked, unasked_by_a_primitive, reduced_twice])
def test_data_that_would_move_unasked_is_refused_by_the_line_that_needs_it(forward: Any) -> None:
    with pytest.raises(PartitionError) as caught:
        split(forward)
    message = str(caught.value)
    assert __file__ in message
    assert "return {" in message
    assert "mplicit redistribution" in message
    assert "constrain what it reads" in message
    assert split(forward, "").collectives == ()


def test_an_operator_without_a_rule_is_refused_by_its_line() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": torch.segment_reduce(i["x"], "sum", lengths=s["seen"])}, s

    with pytest.raises(PartitionError, match=r"(?s)toy: .*test_partition\.py.*segment_reduce.*sharding strategy"):
        split(forward)


def test_needs_a_process_group_of_its_own() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(PartitionError, match=r"torch.distributed is initialised in this process"):
            split(mlp)
    finally:
        dist.destroy_process_group()


def test_leaves_no_process_group_behind() -> None:
    split(mlp)
    with pytest.raises(PartitionError):
        split(unasked)
    assert not dist.is_initialized()
