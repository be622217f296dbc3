"""lowering/ascend/lowered.py: on every rank graphs lowered for GE compute what the partitioned graphs compute."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import fleets
from torch.fx import GraphModule

from npucompile.graphs import compile_count, ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.primitive import NAMESPACE
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.fold import FOLDED
from npucompile.lowering.ascend.lowered import lower
from npucompile.lowering.platform import Platform
from npucompile.models.variant import PLAIN, Variant

F32 = torch.float32
TOLERANCE = 2e-4
GROUPED = Variant(grouped=True)
HEADS = {"q_heads": 2, "delta_heads": 2}
pytestmark = pytest.mark.usefixtures("ta")


def lowered(partitioned: PartitionedProgram) -> GraphModule:
    return lower(partitioned).graph


def lowered_for_the_newest(partitioned: PartitionedProgram) -> GraphModule:
    """Every variant of a lowering that needs a newer release of CANN."""
    return lower(partitioned, Platform("ascend910_93", "9.1")).graph


# --- a model, all ranks ---


@pytest.mark.parametrize(
    ("mesh", "variant", "model", "drafts", "live", "newest"),
    [
        ("dp=2,tp=2", GROUPED, "small", 1, (2, 2), False),
        ("dp=2,tp=2", replace(GROUPED, most_dispatched=1), "small", 1, (1, 0), False),
        ("dp=2,tp=2", replace(GROUPED, most_dispatched=1, dispatches_in_parts=True), "small", 1, (1, 2), False),
        ("dp=2,tp=2", fleets.quantised("w8a8"), "small", 1, (2, 1), False),
        ("dp=2,tp=2", fleets.quantised("w4a8"), "small", 0, (1, 2), False),
        ("dp=2,tp=2", fleets.quantised("w8a8"), "small", 0, (2, 1), True),
        ("dp=2,tp=2", fleets.quantised("w4a8"), "small", 0, (1, 2), True),
        ("tp=2", PLAIN, "dense", 0, (2,), False),
        ("tp=2", PLAIN, "dense", 3, (2,), False),
        ("tp=2", PLAIN, "plain", 0, (2,), False),
        ("dp=2,tp=2", GROUPED, "plain-moe", 0, (2, 1), False),
        ("dp=2,tp=2", GROUPED, "plain-moe", 0, (2, 1), True),
        ("dp=2,tp=2", replace(GROUPED, most_dispatched=0), "plain-moe", 0, (2, 1), False),
        ("dp=2,tp=2", GROUPED, "next", 1, (2, 1), False),
        ("tp=2", fleets.everywhere("w8a8", ffn=2, **HEADS), "dense", 1, (2,), False),
        ("dp=2,tp=2", fleets.everywhere("w8a8", **HEADS), "small", 1, (2, 1), True),
        ("tp=2", fleets.everywhere("w4a8_dynamic", ffn=2, **HEADS), "dense", 1, (2,), False),
        ("dp=2,tp=2", fleets.everywhere("w4a8_dynamic", **HEADS), "small", 1, (2, 1), True),
        ("tp=2", fleets.everywhere("w4a16", ffn=2, **HEADS), "dense", 1, (2,), False),
        ("dp=2,tp=2", fleets.everywhere("w4a16", **HEADS), "small", 1, (2, 1), True),
        ("tp=2", fleets.mixed(q_heads=2), "dense", 1, (2,), False),
        ("tp=2", fleets.mixed(q_heads=2), "latent", 0, (2,), True),
        ("dp=2,tp=2", GROUPED, "latent", 2, (2, 1), False),
        ("dp=2,tp=2", GROUPED, "sparse", 2, (2, 1), False),
    ],
    ids=[
        "dispatched",
        "gathered",
        "in parts",
        "w8a8",
        "w4a8",
        "w8a8, newest",
        "w4a8, newest",
        "dense",
        "dense, three drafts",
        "no gate",
        "no shared expert",
        "no shared expert, newest",
        "no shared expert, gathered",
        "fused projections",
        "static everywhere",
        "static everywhere but experts, newest",
        "int4 everywhere",
        "int4 in groups everywhere, newest",
        "int4 beside floats everywhere",
        "int4 beside floats everywhere, newest",
        "formats of parts differ",
        "formats of parts differ, newest",
        "latent attention",
        "sparse attention",
    ],
)
@pytest.mark.short_cases("dispatched", "w8a8, newest", "int4 everywhere", "latent attention")
def test_every_rank_says_and_remembers_the_same(
    mesh: str, variant: Variant, model: str, drafts: int, live: tuple[int, ...], newest: bool
) -> None:
    """Prompts of different lengths in each row and group, then decode steps that continue from any slot of the last step."""
    compare(mesh, variant, model, drafts, live, lowered_for_the_newest if newest else lowered)


@pytest.mark.parametrize("model", ["small", "plain-moe"])
@pytest.mark.parametrize(
    "variant",
    [GROUPED, *(fleets.everywhere(form, expert_ffn=2, shared_ffn=2, ffn=2, **HEADS) for form in ("w8a8_dynamic", "w4a8_dynamic", "w4a16"))],
    ids=["float", "w8a8", "w4a8 in groups", "w4a16 in groups"],
)
@pytest.mark.short_cases("w8a8-plain-moe")
def test_ranks_that_share_each_expert_do_too(variant: Variant, model: str) -> None:
    compare("tp=2", variant, model, 0, (2,), lowered_for_the_newest, expert_parallel=False)


def compare(
    mesh: str,
    variant: Variant,
    model: str,
    drafts: int,
    live: tuple[int, ...],
    form: Callable[[PartitionedProgram], Any],
    expert_parallel: bool = True,
) -> None:
    """Steps of a model on all ranks, by its functional graphs and by lowered ones: outputs and pools are equal."""
    where, small = Mesh.parse(mesh), fleets.model(variant, experts=model != "dense", name="small" if model == "dense" else model)
    eager, device = (fleets.Fleet(small, where, expert_parallel, form=each, drafts=drafts) for each in (fleets.functional, form))
    buffers = [[t.data_ptr() for t in own] for own in device.state]
    answers, serving = fleets.answers(small, 2, live, 4 * (drafts + 1)), fleets.Serving(2, drafts, live)
    for n, (bucket, inputs) in enumerate(serving.steps(4)):
        if n > 1 and drafts:
            force(serving, (eager, device), answers)
        want, got = eager.step(bucket, inputs), device.step(bucket, inputs)
        for group, (a, b) in enumerate(zip(got, want, strict=True)):
            sampled, rows = fleets.valid_positions(bucket, inputs[group]), inputs[group]["request_slots"] > 0
            torch.testing.assert_close(a["logits"][sampled], b["logits"][sampled], rtol=0, atol=TOLERANCE)
            assert torch.equal(a["tokens"][sampled], b["tokens"][sampled])
            assert all(torch.equal(a[name][rows], b[name][rows]) for name in a if name not in ("tokens", "logits"))
            if not sampled[rows].all():
                continue
            for leaf, mine, theirs in zip(eager.names, device.pool(group), eager.pool(group), strict=True):
                # Page 0, slot 0 and request slot 0 are written by padding and undefined.
                assert torch.allclose(mine[1:], theirs[1:], rtol=0, atol=TOLERANCE), f"step {n}, group {group}, {leaf}"
        serving.commit(bucket, inputs, want)
    # In quantised products an activation that rounds differently would exceed the tolerance; in these steps none does.
    assert [[t.data_ptr() for t in own] for own in device.state] == buffers, "pools are written in place"
    assert all(float(t[1:].abs().max()) > 0 for t in device.pool(0)), "every pool was written"


def force(serving: Any, both: Sequence[Any], answers: Sequence[Any]) -> None:
    """Writes equal drafts to the request slots of all ranks of a group, in both fleets."""
    for group, truth in enumerate(answers):
        for pool in (pool for fleet in both for pool in fleet.request_slots(group)):
            serving.force(group, pool, truth)


def test_what_padding_holds_reaches_nobody() -> None:
    """NaN in the null page and slot, and in every page and slot that no request owns."""
    where, model = Mesh.parse("dp=2,tp=2"), fleets.model(GROUPED)
    eager, device = (fleets.Fleet(model, where, form=form, drafts=1) for form in (fleets.functional, lowered))
    for pool in (pool for own in device.state for pool in own if pool.is_floating_point()):
        pool.fill_(float("nan"))
    serving = fleets.Serving(2, 1, (1, 1))
    for bucket, inputs in serving.steps(3):
        want, got = eager.step(bucket, inputs), device.step(bucket, inputs)
        for own, a, b in zip(inputs, got, want, strict=True):
            sampled, rows = fleets.valid_positions(bucket, own), own["request_slots"] > 0
            torch.testing.assert_close(a["logits"][sampled], b["logits"][sampled], rtol=0, atol=TOLERANCE)
            assert torch.equal(a["drafts"][rows], b["drafts"][rows])
        serving.commit(bucket, inputs, want)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_context_that_is_full_says_nothing_and_reads_no_page_beyond_it(drafts: int) -> None:
    """As for a step launched before the one that ends the request is read. Kernels refuse keys beyond the page table."""
    model, last = fleets.model(experts=False), fleets.limits(drafts).max_model_len
    both = [fleets.Fleet(model, Mesh(), form=form, drafts=drafts) for form in (fleets.functional, lowered)]
    serving = fleets.Serving(2, drafts, (2,))
    for n, (bucket, inputs) in enumerate(serving.steps(3)):
        if n == 2:
            for fleet in both:
                fleet.request_slots(0)[0][1:3, 0] = torch.tensor([last - 2, last - 1])
        a, b = (fleet.step(bucket, inputs)[0] for fleet in both)
        assert all(torch.equal(a[name], b[name]) for name in ("counts",) if name in a)
        # Drafts beyond the longest context are verified by no step.
        room = (last - 1 - both[1].request_slots(0)[0][1:3, 0]).clamp(0, drafts)
        assert all(torch.equal(a["drafts"][row, :n], b["drafts"][row, :n]) for row, n in enumerate(room.tolist()) if drafts)
        serving.commit(bucket, inputs, [b])
    assert b["counts"].tolist() == [0, 0]
    assert all(fleet.request_slots(0)[0][1:3, 0].tolist() == [last, last] for fleet in both)


# --- the form of a lowered graph ---


@pytest.fixture(scope="module")
def decode() -> PartitionedProgram:
    return fleets.Fleet(fleets.model(GROUPED), Mesh.parse("dp=2,tp=2"), drafts=3).partitioned(fleets.Bucket("decode", 2, 4))


def nodes(graph: GraphModule) -> list[torch.fx.Node]:
    return [n for part in (graph, *bodies(graph).values()) for n in part.graph.nodes]


def test_the_main_graph_only_calls(decode: PartitionedProgram) -> None:
    before = as_text(decode.graph, "")
    found = lower(decode)
    assert as_text(decode.graph, "") == before, "the partitioned graph is left alone"
    assert (found.backend, found.bucket, found.signature) == ("ge", Bucket("decode", 2, 4), decode.signature)
    kinds = {n.op for n in found.graph.graph.nodes}
    assert kinds == {"placeholder", "call_module", "call_function", "output"}
    assert {n.target for n in found.graph.graph.nodes if n.op == "call_function"} == {operator.getitem}
    layers = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    order = [str(n.target) for n in found.graph.graph.nodes if n.op == "call_module"]
    assert list(bodies(found.graph)) == list(dict.fromkeys(order))
    assert [name for name in order if not name.startswith("between")] == [
        FOLDED,
        "prologue",
        *layers,
        "extend_draft_cache",
        "draft",
        *("extend_draft_cache_own", "draft") * 2,
        "epilogue",
    ]
    assert [n.meta["leaf"] for n in found.graph.graph.nodes if n.op == "placeholder"] == [leaf.name for leaf in decode.signature.operands]


def test_bodies_hold_operators_of_the_device_on_the_device(decode: PartitionedProgram) -> None:
    for node in (n for name, body in bodies(lowered(decode)).items() if name != FOLDED for n in body.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload):
            assert node.target.namespace in ("aten", "npu", "air", "_c10d_functional"), node.target
            assert node.target.namespace != NAMESPACE
        values = node.meta.get("val", ())
        for value in values if isinstance(values, (list, tuple)) else [values]:
            assert value.device.type == "meta"
        assert all(device.type == "meta" for device in (*node.args, *node.kwargs.values()) if isinstance(device, torch.device))
        assert node.op not in ("get_attr", "call_method")


def test_results_are_outputs_and_pools_are_written(decode: PartitionedProgram) -> None:
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


def test_lowering_counts_as_a_trace(decode: PartitionedProgram) -> None:
    before = compile_count.count()
    lower(decode)
    assert compile_count.count() == before + 1


# --- pools ---

POOL = Aval((4, 3), F32)


def toy(forward: Any) -> PartitionedProgram:
    state = {"a": POOL, "b": POOL, "c": POOL}
    program = Program("toy", Bucket("decode", 2, 1), forward, {}, state, {"x": POOL})
    return optimise(partition(program, Mesh(), Rules()))


def one(x: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + pool, pool * 2


def other_way(pool: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pool * 2, x + pool


def run(found: PartitionedProgram) -> None:
    """Compares two steps of the lowered graph with the functional one."""
    operands = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0)).unbind()
    state, own, x = list(operands[:3]), [t.clone() for t in operands[:3]], operands[3]
    step, outputs = Interpreter(lowered(found), Mesh()), len(found.signature.outputs)
    for _ in range(2):
        results = found.graph(*state, x)
        (got,) = step([[*own, x]])
        torch.testing.assert_close(got, list(results[:outputs]))
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


def look(pool: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + pool.sum()


def test_a_pool_is_read_before_it_is_written_and_after() -> None:
    """Each call reads the value of its position in the graph's order, although the pool is a single operand."""

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        x = block("look", look, (), s["a"], i["x"])
        x, a = block("one", one, (), x, s["a"])
        return {"y": x, "z": block("look", look, (), a, x)}, {**s, "a": a}

    run(toy(forward))


def test_calls_write_one_pool_one_after_the_other() -> None:
    """As in a draft head, no call takes another's result, and all take the pool."""
    fleet = fleets.Fleet(fleets.model(experts=False), Mesh(), drafts=3)
    graph = lowered(fleet.partitioned(fleets.Bucket("decode", 2, 4)))
    calls = [n for n in graph.graph.nodes if n.op == "call_module" and str(n.target).startswith("extend_draft_cache")]
    read = [[arg.meta["leaf"] for arg in call.args if str(arg.meta.get("leaf", "")).startswith("state.")] for call in calls]
    assert read == [["state.mtp.k", "state.mtp.v"]] * 3


def test_what_nothing_puts_in_order_is_refused() -> None:
    """test_donation.py has all cases that are refused."""

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        y = block("look", look, (), s["a"], i["x"])
        x, a = block("one", one, (), i["x"], s["a"])
        return {"x": x, "y": y}, {**s, "a": a}

    with pytest.raises(LoweringError, match=r"state.a is read by look, one and overwritten by one; legal are one call"):
        lower(toy(forward))


def test_a_primitive_without_operators_of_the_device_is_inlined_by_its_reference() -> None:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": ops.linear(i["x"], i["x"]) @ i["x"]}, s

    graph = lowered(toy(forward))
    assert not [n for n in nodes(graph) if getattr(n.target, "namespace", "") == NAMESPACE]
    run(toy(forward))
