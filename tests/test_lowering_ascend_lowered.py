"""Graphs lowered for GE say and remember, on every rank, what the partitioned graphs they were made of do."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from npucompile.graphs import events, ops
from npucompile.graphs.block import block
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.flatten import bodies
from npucompile.graphs.optimise import optimise
from npucompile.graphs.partition import Partitioned, partition
from npucompile.graphs.primitive import NAMESPACE
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree
from npucompile.lowering.ascend import harness
from npucompile.lowering.ascend.lowered import lower
from npucompile.lowering.lockstep import Lockstep
from npucompile.models.variant import PLAIN, Variant

F32 = torch.float32
TOLERANCE = 2e-4
GROUPED = Variant(experts="grouped")
pytestmark = pytest.mark.usefixtures("torchair")


@pytest.fixture(scope="module")
def torchair(tmp_path_factory: pytest.TempPathFactory) -> harness.Torchair:
    return harness.load(tmp_path_factory.mktemp("stubs"))


def lowered(found: Partitioned) -> GraphModule:
    return lower(found).graph


# --- a model, all ranks ---


@pytest.mark.parametrize(
    ("mesh", "variant", "experts", "q_len", "live"),
    [
        ("dp=2,tp=2", GROUPED, True, 2, (2, 2)),
        ("dp=2,tp=2", replace(GROUPED, most_dispatched=1), True, 2, (1, 0)),
        ("dp=2,tp=2", Variant.of("w8a8", grouped=True), True, 2, (2, 1)),
        ("dp=2,tp=2", Variant.of("w4a8", grouped=True), True, 2, (1, 2)),
        ("tp=2", PLAIN, False, 1, (2,)),
    ],
    ids=["dispatched", "gathered", "w8a8", "w4a8", "dense"],
)
def test_every_rank_says_and_remembers_the_same(
    fleets: ModuleType, mesh: str, variant: Variant, experts: bool, q_len: int, live: Sequence[int]
) -> None:
    """Prompts of other lengths in each row and group, then decode steps that go on from any of the last step's slots."""
    where, model = Mesh.parse(mesh), fleets.model(variant, experts=experts)
    eager, device = (fleets.Fleet(model, where, form=form) for form in (fleets.functional, lowered))
    buffers = [[t.data_ptr() for t in own] for own in device.state]
    serving = fleets.Serving(2, q_len, live)
    for n in range(5):
        bucket, given = (serving.decode, serving.next()) if n else (serving.prefill, serving.first())
        want, said = eager.step(bucket, given), device.step(bucket, given)
        for group, (a, b) in enumerate(zip(said, want, strict=True)):
            rows = live[group]
            torch.testing.assert_close(a["logits"][:rows], b["logits"][:rows], rtol=0, atol=TOLERANCE)
            assert torch.equal(a["tokens"][:rows], b["tokens"][:rows])
            for leaf, mine, theirs in zip(eager.pools, device.pool(group), eager.pool(group), strict=True):
                # Page 0 and slot 0 are what padding writes, in whatever way.
                assert torch.allclose(mine[1:], theirs[1:], rtol=0, atol=TOLERANCE), f"step {n}, group {group}, {leaf}"
        serving.take([outputs["tokens"] for outputs in want], given)
    # Of quantised products one activation that rounds the other way is seen at once; in these steps none does.
    assert [[t.data_ptr() for t in own] for own in device.state] == buffers, "pools are written in place"
    assert all(float(t[1:].abs().max()) > 0 for t in device.pool(0)), "every pool was written"


def test_what_padding_holds_reaches_nobody(fleets: ModuleType) -> None:
    """NaN in the null page and slot, and in every page and slot that no request owns."""
    where, model = Mesh.parse("dp=2,tp=2"), fleets.model(GROUPED)
    eager, device = (fleets.Fleet(model, where, form=form) for form in (fleets.functional, lowered))
    for own in device.state:
        for pool in own:
            pool.fill_(float("nan"))
    serving = fleets.Serving(2, 2, (1, 1))
    for n in range(4):
        bucket, given = (serving.decode, serving.next()) if n else (serving.prefill, serving.first())
        want, said = eager.step(bucket, given), device.step(bucket, given)
        for a, b in zip(said, want, strict=True):
            torch.testing.assert_close(a["logits"][:1], b["logits"][:1], rtol=0, atol=TOLERANCE)
        serving.take([outputs["tokens"] for outputs in want], given)


# --- what a lowered graph is ---


@pytest.fixture(scope="module")
def decode(fleets: ModuleType) -> Partitioned:
    return fleets.Fleet(fleets.model(GROUPED), Mesh.parse("dp=2,tp=2")).partitioned(fleets.Bucket("decode", 2, 2))


def nodes(graph: GraphModule) -> list[torch.fx.Node]:
    return [n for part in (graph, *bodies(graph).values()) for n in part.graph.nodes]


def test_the_main_graph_only_calls(decode: Partitioned) -> None:
    before = as_text(decode.graph, "")
    found = lower(decode)
    assert as_text(decode.graph, "") == before, "the partitioned graph is left alone"
    assert (found.backend, found.bucket, found.signature) == ("ge", Bucket("decode", 2, 2), decode.signature)
    kinds = {n.op for n in found.graph.graph.nodes}
    assert kinds == {"placeholder", "call_module", "call_function", "output"}
    assert {n.target for n in found.graph.graph.nodes if n.op == "call_function"} == {operator.getitem}
    assert list(bodies(found.graph)) == ["prologue", "linear_attention", "full_attention", "epilogue"]
    order = [str(n.target) for n in found.graph.graph.nodes if n.op == "call_module"]
    assert order == ["prologue", "linear_attention", "full_attention", "linear_attention", "linear_attention", "epilogue"]
    assert [n.meta["leaf"] for n in found.graph.graph.nodes if n.op == "placeholder"] == [leaf.name for leaf in decode.signature.operands]


def test_bodies_hold_operators_of_the_device_on_the_device(decode: Partitioned) -> None:
    for node in (n for body in bodies(lowered(decode)).values() for n in body.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload):
            assert node.target.namespace in ("aten", "npu", "air", "_c10d_functional"), node.target
            assert node.target.namespace != NAMESPACE
        values = node.meta.get("val", ())
        for value in values if isinstance(values, (list, tuple)) else [values]:
            assert value.device.type == "meta"
        assert all(device.type == "meta" for device in (*node.args, *node.kwargs.values()) if isinstance(device, torch.device))
        assert node.op not in ("get_attr", "call_method")


def test_results_are_outputs_and_pools_are_written(decode: Partitioned) -> None:
    graph = lowered(decode)
    results = graph.graph.output_node().args[0]
    assert [tuple(n.meta["val"].shape) for n in results] == [leaf.aval.shape for leaf in decode.signature.outputs]
    pools = {leaf.aval.shape for leaf in decode.signature.state}
    for body in bodies(graph).values():
        shapes = {tuple(n.meta["val"].shape) for n in body.graph.output_node().args[0]}
        assert not shapes & pools
    for call in (n for n in graph.graph.nodes if n.op == "call_module"):
        inner = bodies(graph)[str(call.target)].graph.output_node().args[0]
        assert [tuple(v.shape) for v in call.meta["val"]] == [tuple(n.meta["val"].shape) for n in inner]
        assert all(int(str(user.args[1])) < len(inner) for user in call.users)


def test_lowering_counts_as_a_trace(decode: Partitioned) -> None:
    before = events.count()
    lower(decode)
    assert events.count() == before + 1


# --- pools ---

POOL = Aval((4, 3), F32)


def toy(forward: Any) -> Partitioned:
    state = {"a": POOL, "b": POOL, "c": POOL}
    program = Program("toy", Bucket("decode", 2, 1), forward, {}, state, {"x": POOL})
    return optimise(partition(program, Mesh(), Rules()))


def one(x: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + pool, pool * 2


def other_way(pool: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pool * 2, x + pool


def run(found: Partitioned) -> None:
    """The lowered graph twice over its pools, against the functional one."""
    operands = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0)).unbind()
    state, own, x = list(operands[:3]), [t.clone() for t in operands[:3]], operands[3]
    step, outputs = Lockstep(lowered(found), Mesh()), len(found.signature.outputs)
    for _ in range(2):
        results = found.graph(*state, x)
        (said,) = step([[*own, x]])
        torch.testing.assert_close(said, list(results[:outputs]))
        state = list(results[outputs:])
        torch.testing.assert_close(own, state)


def test_a_body_writes_the_pools_that_each_call_gives_it() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        x, a = block("one", one, (), i["x"], s["a"])
        x, b = block("one", one, (), x, s["b"])
        return {"y": x}, {"a": a, "b": b, "c": s["c"]}

    run(toy(forward))


def test_results_before_and_behind_a_pool_keep_their_order() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        a, x = block("other", other_way, (), s["a"], i["x"])
        return {"x": x, "z": x * 3}, {"a": a, "b": s["b"] + x, "c": s["c"] * 2}

    run(toy(forward))


def test_a_pool_that_two_calls_read_is_refused() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        x, _ = block("one", one, (), i["x"], s["a"])
        x, a = block("one", one, (), x, s["a"])
        return {"y": x}, {**s, "a": a}

    with pytest.raises(LoweringError, match=r"state.a is read by one, one_1 and made anew by one_1; legal is one call"):
        lower(toy(forward))


def test_a_pool_that_a_call_is_given_twice_is_refused() -> None:
    """Its body would write the one operand and read the other, which is the same memory."""

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        x, a = block("one", one, (), s["a"], s["a"])
        return {"y": x}, {**s, "a": a}

    with pytest.raises(LoweringError, match=r"state.a is read by one and made anew by one; legal is one call"):
        lower(toy(forward))


def test_a_pool_that_takes_another_s_place_is_refused() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        x, a = block("one", one, (), i["x"], s["a"])
        x, b = block("one", one, (), x, s["b"])
        return {"y": x}, {**s, "a": b, "b": a}

    with pytest.raises(LoweringError, match=r"state.a is read by .* legal is one call"):
        lower(toy(forward))


def test_a_body_with_pools_in_other_places_is_refused() -> None:
    """Once its operand is a pool, once it is a value of the graph."""

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        x, a = block("one", one, (), i["x"], s["a"])
        x, y = block("one", one, (), x, i["x"])
        return {"y": x + y}, {**s, "a": a}

    with pytest.raises(LoweringError, match=r"body one is called with pools at operands .* legal is one place"):
        lower(toy(forward))


def test_a_primitive_without_operators_of_the_device_is_inlined_by_its_reference() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": ops.linear(i["x"], i["x"]) @ i["x"]}, s

    graph = lowered(toy(forward))
    assert not [n for n in nodes(graph) if getattr(n.target, "namespace", "") == NAMESPACE]
    run(toy(forward))
