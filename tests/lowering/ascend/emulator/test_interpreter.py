"""lowering/ascend/emulator/interpreter.py: a shipped GE file computes what the graph before torchair computes, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import fleets
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.spmd.partition import PartitionedProgram
from npucompile.graphs.types import Bucket, Mesh
from npucompile.lowering.ascend.emulator.ge_program import ORDERS
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.fold import evaluate
from npucompile.lowering.ascend.ge_file import STREAM, GeFile, messages, parse
from npucompile.lowering.ascend.hoist import hoist
from npucompile.lowering.ascend.inspect_ge import check
from npucompile.lowering.ascend.link import link
from npucompile.lowering.ascend.lowered import lower
from npucompile.lowering.ascend.overlap import in_order_of_time
from npucompile.lowering.ascend.shipped import GE
from npucompile.lowering.collectives_check import of_ge_file
from npucompile.lowering.platform import Platform
from npucompile.models.variant import Variant

gb = gc.gb
Operands = list[list[torch.Tensor]]


def copied(ranks: Operands) -> Operands:
    return [[x.clone() for x in operands] for operands in ranks]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in every bit, with NaN in the same elements."""
    return torch.equal(a.nan_to_num(-7), b.nan_to_num(-7))


def equal(one: Operands, other: Operands) -> bool:
    return all(same(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def agree(graph: Any, ge_file: GeFile, mesh: str, ranks: Operands, steps: int = 1) -> Operands:
    """Runs the GE file in every order; results and state equal the graph's. Returns the results of the last step."""
    where = Mesh.parse(mesh)
    before, results = copied(ranks), []
    for _ in range(steps):
        want = Interpreter(graph, where)(before)
    for order in ORDERS:
        mine, interpreter = copied(ranks), Interpreter(ge_file, where, order=order)
        for _ in range(steps):
            results = interpreter(mine)
        for got, expected in zip([*results, *mine], [*want, *before], strict=True):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not equal(before, ranks) or ge_file.bound == ge_file.donations == ()
    return results


# --- bodies ---


def dense(pool: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pool.copy_(pool * 2 + x.sum())
    return (x + 1,)


def test_a_donated_output_comes_home(ta: Any) -> None:
    operands = [gc.draw(4, 3), gc.draw(2, 3, seed=1)]
    graph, ge_file = gc.shipped(ta, dense, operands, states=1)
    assert len(ge_file.donations) == 1
    agree(graph, ge_file, "", [operands])
    operands = [gc.draw(4, 3), gc.draw(4, 3, seed=2), gc.draw(2, 3, seed=1)]
    graph, ge_file = gc.shipped(ta, dense, [operands[0], operands[2]], states=1, calls=2)
    assert len(ge_file.donations) == 2
    agree(graph, ge_file, "", [operands], steps=3)


def test_derived_values_are_computed_here_or_given(ta: Any) -> None:
    """The lowered graph computes them in each step; on a device they are loaded, and what only they read is not."""
    main = gb.Main()
    g, x = main.operand("params.g", ((3,), gb.F32)), main.operand("inputs.x", ((2, 3), gb.F32))
    main.body("norm", lambda x, g: (x * (1 + g),), [((2, 3), gb.F32), ((3,), gb.F32)])
    graph, signature = main.done(*main.call("norm", x, g))
    hoisted = hoist(graph, signature)
    ge_file, operands = link(hoisted, signature, ta), [gc.draw(3), gc.draw(2, 3, seed=1)]
    assert ge_file.data == (1, 2)
    assert "Add" not in GE.census(ge_file)
    results = agree(hoisted, ge_file, "", [operands])
    assert equal(agree(graph, ge_file, "", [operands]), results)
    loaded = [torch.full((3,), torch.nan), operands[1], *evaluate(ge_file, operands)]
    assert equal(Interpreter(ge_file, Mesh())([loaded]), results)
    with pytest.raises(LoweringError, match="rank 0 has 1 operands, the graph takes 2"):
        Interpreter(ge_file, Mesh())([operands[:1]])


def scatter(pool: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    old = pool.index_select(0, rows.view(2))
    torch.ops.npu.npu_scatter_nd_update_(pool, rows, x + old)
    return (x * 3, old)


def test_what_was_read_before_a_write_in_place_stays(ta: Any) -> None:
    operands = [gc.draw(5, 3), gc.draw(2, 3, seed=1), gc.i32([3], [1])]
    graph, ge_file = gc.shipped(ta, scatter, operands, states=1)
    assert ge_file.bound == (0,)
    ((_, old),) = agree(graph, ge_file, "", [operands], steps=2)
    assert torch.equal(old, operands[0][[3, 1]] + operands[1])


# --- a graph by hand ---


Hand = gc.Hand


def racing(after: Sequence[str] = (), stream: str = "") -> GeFile:
    """A reader of a pool and a writer of it; the writer waits for `after`, and may be on another stream."""
    hand = Hand()
    pool, rows, new = hand.data(0), hand.data(1), hand.data(2)
    read = hand.op("Neg", {"x": pool}, "read")
    written = hand.op("ScatterNdUpdate", {"var": pool, "indices": rows, "updates": new}, "write", after=after)
    if stream:
        hand.model.graph[0].op[-1].attr[STREAM].s = stream.encode()
    size = hand.op("Shape", {"x": written}, "size")
    return hand.done(read, size, inputs=3, bound=[0])


def raced(ge_file: GeFile) -> list[torch.Tensor]:
    operands = [torch.zeros(3, 2), gc.i32([1]), torch.ones(1, 2)]
    return [Interpreter(ge_file, Mesh(), order=order)(copied([operands]))[0][0] for order in ORDERS]


def test_an_order_that_only_the_file_keeps_is_found_by_the_other_order() -> None:
    first, second, *_ = raced(racing())
    assert not torch.equal(first, second)
    assert raced(racing(after=["read"]))[1].abs().sum() == 0


def test_a_missing_event_between_streams_is_found_by_one_of_their_orders() -> None:
    *_, early, late = raced(racing(stream="side"))
    assert not torch.equal(early, late)
    *_, early, late = raced(racing(after=["read"], stream="side"))
    assert torch.equal(early, late)
    assert early.abs().sum() == 0


def test_views_share_memory_and_all_else_has_its_own() -> None:
    hand = Hand()
    pool, rows, new = hand.data(0), hand.data(1), hand.data(2)
    shape = hand.op("Const", {}, "shape", value=gc.i64(2, 2))
    view = hand.op("Reshape", {"x": pool, "shape": shape}, "view")
    axis = hand.op("Const", {}, "axis", value=gc.i64(1, 0))
    moved = hand.op("Transpose", {"x": view, "perm": axis}, "moved")
    copy = hand.op("Identity", {"x": pool}, "copy")
    written = hand.op("ScatterNdUpdate", {"var": pool, "indices": rows, "updates": new}, "write", after=["copy", "moved"])
    late = hand.op("Neg", {"x": view}, "late", after=["write"])
    ge_file = hand.done(late, moved, copy, written, inputs=3, bound=[0])
    operands = [torch.arange(4.0), gc.i32([1]), torch.tensor([9.0])]
    late, moved, copy, written = Interpreter(ge_file, Mesh())([operands])[0]
    assert late.tolist() == [[0, -9], [-2, -3]]
    assert moved.tolist() == [[0, 2], [1, 3]]
    assert copy.tolist() == [0, 1, 2, 3]
    assert operands[0].tolist() == written.tolist() == [0, 9, 2, 3]
    # A result is a copy, not the pool itself.
    operands[0].zero_()
    assert written.tolist() == [0, 9, 2, 3]


def test_donations_may_exchange_two_operands() -> None:
    hand = Hand()
    first, second = hand.data(0), hand.data(1)
    shape = hand.op("Const", {}, "shape", value=gc.i64(2))
    views = [hand.op("Reshape", {"x": x, "shape": shape}, f"view{i}") for i, x in enumerate((second, first))]
    ge_file = hand.done(*views, inputs=2, donations=[(0, 0), (1, 1)])
    operands = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    assert Interpreter(ge_file, Mesh())([operands]) == [[]]
    assert [x.tolist() for x in operands] == [[3, 4], [1, 2]]


def test_operands_that_nobody_reads_are_not_fed() -> None:
    hand = Hand()
    ge_file = hand.done(hand.op("Neg", {"x": hand.data(0)}, "neg"), inputs=3, feeds=(2,))
    ((result,),) = Interpreter(ge_file, Mesh())([[torch.zeros(1), torch.zeros(1), torch.tensor([5.0])]])
    assert result.tolist() == [-5]


def test_assign_writes_what_it_is_given() -> None:
    hand = Hand()
    pool, new = hand.data(0), hand.data(1)
    ge_file = hand.done(hand.op("Assign", {"ref": pool, "value": new}, "assign"), inputs=2, bound=[0])
    operands = [torch.zeros(2), torch.ones(2)]
    Interpreter(ge_file, Mesh())([operands])
    assert operands[0].tolist() == [1, 1]


def test_float32_is_kept_where_a_fused_operator_says_bfloat16() -> None:
    def norm(kind: str, meta: str) -> Interpreter:
        hand = Hand()
        gamma = {"gamma": hand.data(1)} if kind == "RmsNorm" else {}
        hand.op(kind, {"x": hand.data(0)} | gamma, "op", [meta, ""] if gamma else [meta])
        return Interpreter(hand.done("op:0", inputs=2 if gamma else 1), Mesh())

    operands = [torch.ones(2, 4), torch.ones(4)]
    assert norm("RmsNorm", "bf16[2,4]")([operands])[0][0].dtype is torch.float32
    for kind, meta in (("RmsNorm", "bf16[2,3]"), ("RmsNorm", "f16[2,4]"), ("Neg", "bf16[2,4]")):
        with pytest.raises(LoweringError, match=rf"output 0 of op \({kind}\) is f32\[2,4\]; the graph says {meta[:3]}"):
            norm(kind, meta)([operands if kind == "RmsNorm" else operands[:1]])


# --- what is refused ---


def unknown(hand: Hand) -> GeFile:
    return hand.done(hand.op("Teleport", {"x": hand.data(0)}, "op"))


def unread(hand: Hand) -> GeFile:
    return hand.done(hand.op("Neg", {"x": "later:0"}, "op"), inputs=1)


def beyond(hand: Hand) -> GeFile:
    return hand.done(hand.op("Neg", {"x": hand.data(0)[:-1] + "1"}, "op"))


def twice(hand: Hand) -> GeFile:
    x = hand.data(0)
    hand.op("Neg", {"x": x}, "op")
    return hand.done(hand.op("Neg", {"x": x}, "op"))


def waiting(hand: Hand) -> GeFile:
    return hand.done(hand.op("Neg", {"x": hand.data(0)}, "op", after=["nobody"]))


def two_graphs(hand: Hand) -> GeFile:
    hand.model.graph.add(name="other")
    return hand.done(hand.data(0))


def writes(hand: Hand, target: str, **more: Any) -> GeFile:
    hand.op("ScatterNdUpdate", {"var": target, "indices": hand.data(1), "updates": hand.data(2)}, "op")
    return hand.done("op:0", inputs=3, **more)


CONTRADICTIONS: list[tuple[Callable[[Hand], GeFile], str]] = [
    (unknown, r"op \(Teleport\) is of a type that the interpreter does not know; it knows Abs, Add, .*Hcom.*NetOutput"),
    (unread, r"op reads later:0, which no operator before it gives"),
    (beyond, r"op reads x0:1, which no operator before it gives"),
    (twice, "two operators are called op"),
    (waiting, "op reads nobody:-1, which no operator before it gives"),
    (two_graphs, "the model has 2 graphs; legal is one"),
    (lambda hand: writes(hand, hand.data(0)), r"operators write operands \[0\], the GE file has \[\] bound and \[\] donated"),
    (lambda hand: writes(hand, hand.data(0), bound=[0, 1]), r"write operands \[0\], the GE file has \[0, 1\] bound"),
    (lambda hand: writes(hand, hand.op("Const", {}, "c", value=torch.zeros(3))), "an operator writes the constant c:0"),
    (lambda hand: hand.done(hand.data(0), "x0:0"), "NetOutput has .2. inputs; legal is one with 2 of them, all different"),
    (lambda hand: replace(hand.done(hand.data(0)), outputs=2), "NetOutput has .1. inputs; legal is one with 2"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), CONTRADICTIONS, ids=range(len(CONTRADICTIONS)))
def test_a_graph_that_contradicts_itself_is_refused(make: Callable[[Hand], GeFile], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        Interpreter(make(Hand()), Mesh())


def test_other_orders_are_refused() -> None:
    with pytest.raises(LoweringError, match="order is 'random'; legal are file, reversed-ready"):
        Interpreter(Hand().done(), Mesh(), order="random")
    with pytest.raises(LoweringError, match="order is 'reversed-ready'; legal for operators of torch is file"):
        Interpreter(torch.fx.GraphModule({}, torch.fx.Graph()), Mesh(), order="reversed-ready")


def test_other_operands_are_refused() -> None:
    hand = Hand()
    interpreter = Interpreter(hand.done(hand.op("Neg", {"x": hand.data(0, "f32[2,3]")}, "op")), Mesh.parse("tp=2"))
    with pytest.raises(LoweringError, match="operands of 1 ranks, the mesh has 2"):
        interpreter([[torch.zeros(2, 3)]])
    with pytest.raises(LoweringError, match="rank 1 has 2 operands, the graph takes 1"):
        interpreter([[torch.zeros(2, 3)], [torch.zeros(2, 3)] * 2])
    with pytest.raises(LoweringError, match=r"rank 1 feeds x0 with f32\[3,2\]; the graph takes f32\[2,3\]"):
        interpreter([[torch.zeros(2, 3)], [torch.zeros(3, 2)]])


def test_results_of_another_number_or_kind_are_refused() -> None:
    hand = Hand()
    hand.op("RmsNorm", {"x": hand.data(0), "gamma": hand.data(1)}, "op")
    with pytest.raises(LoweringError, match=r"op \(RmsNorm\) gives 2 values, the graph says 1"):
        Interpreter(hand.done("op:0", inputs=2), Mesh())([[torch.ones(1, 2), torch.ones(2)]])
    hand = Hand()
    packed = hand.op("Bitcast", {"x": hand.data(0)}, "op", type=29, keep_dim=True)
    with pytest.raises(LoweringError, match="op:0 is Int4; legal is a tensor"):
        Interpreter(hand.done(packed), Mesh())([[gc.i32(1)]])
    hand = Hand()
    ge_file = hand.done(hand.op("Neg", {"x": hand.data(0)}, "op"))
    model = parse(ge_file.graph)
    desc = model.graph[0].op[-1].input_desc[0]
    desc.dtype, desc.shape.dim[:] = messages().DataType.Value("DT_INT32"), [2]
    ge_file = replace(ge_file, graph=model.SerializeToString())
    with pytest.raises(LoweringError, match=r"NetOutput takes op:0, f32\[2\]; the graph says i32\[2\]"):
        Interpreter(ge_file, Mesh())([[torch.ones(2)]])


def test_attributes_that_mean_nothing_here_are_refused() -> None:
    hand = Hand()
    ge_file = hand.done(hand.op("Neg", {"x": hand.data(0)}, "op", rounding="up"))
    with pytest.raises(LoweringError, match=r"op \(Neg\) has rounding, which the interpreter does not know; it knows x"):
        Interpreter(ge_file, Mesh())([[torch.ones(2)]])


@pytest.mark.usefixtures("ta")
def test_ranks_of_a_captured_graph_exchange_and_derive_values_of_their_own() -> None:
    def body(gamma: Any, pool: Any, x: Any) -> tuple[Any, ...]:
        pool.add_(1)
        return (torch.ops._c10d_functional.all_reduce(x * (1 + gamma), "sum", "tp"),)

    made, _ = ag.of_body(body, params_g=((2,), ag.F32), state_pool=((2,), ag.F32), inputs_x=((2,), ag.F32))
    assert made.folded is not None
    operands = [[torch.full((2,), float(rank)), torch.zeros(2), torch.ones(2)] for rank in range(2)]
    assert [results[0].tolist() for results in Interpreter(made, Mesh.parse("tp=2"))(operands)] == [[3.0, 3.0]] * 2
    assert all(own[1].tolist() == [1.0, 1.0] for own in operands)


# --- a whole model ---


GROUPED = Variant(grouped=True)


@dataclass(frozen=True)
class Whole:
    """A model on a mesh with k drafts; with log probabilities its steps give no logits.

    Attributes:
        cann: release that it is lowered for.
        decode, prefill: types that the steps must have.
    """

    cann: str
    mesh: str
    experts: bool
    drafts: int
    logprobs: int
    decode: str
    prefill: str
    variant: Variant = GROUPED


WHOLE = {
    "three drafts": Whole(
        "8.5",
        "dp=2,tp=2",
        True,
        3,
        2,
        "RecurrentGatedDeltaRule MoeDistributeCombineV2 HcomAllToAll TopKV2 ScatterPaKvCache",
        "HcomAllToAll",
    ),
    "one draft": Whole("8.3", "tp=2", False, 1, 0, "HcomAllReduce ArgMaxWithValue Addcmul", "HcomAllReduce BatchMatMul"),
    "two parts in flight": Whole(
        "9.1",
        "dp=2,tp=2",
        True,
        1,
        0,
        "MoeDistributeDispatchV2",
        "MoeDistributeCombineV2 ChunkGatedDeltaRule",
        replace(GROUPED, most_dispatched=1, dispatches_in_parts=True, in_flight=2),
    ),
    "no drafts": Whole("8.5", "", True, 0, 0, "MoeInitRoutingV3 RecurrentGatedDeltaRule", "MoeInitRoutingV3"),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.short_cases("one draft")
def test_a_model_after_torchair_is_the_model_before_it(ta: Any, name: str) -> None:
    """Bit by bit, in every order that GE may choose, over prefill and steps that accept all drafts, some or none."""
    case = WHOLE[name]
    mesh, types = Mesh.parse(case.mesh), {"decode": case.decode.split(), "prefill": case.prefill.split()}
    cache: dict[Bucket, tuple[Any, GeFile]] = {}

    def both(partitioned: PartitionedProgram) -> tuple[Any, GeFile]:
        """The graph before torchair and the GE file after it, cached by bucket."""
        bucket = partitioned.program.bucket
        if bucket not in cache:
            platform = Platform("ascend910_93", case.cann)
            lowered = lower(partitioned, platform)
            ge_file = in_order_of_time(link(lowered.graph, lowered.signature, ta, platform=platform), mesh, platform)
            check(ge_file, lowered.signature)
            assert of_ge_file(ge_file, in_order=True) == partitioned.collectives
            assert set(types[bucket.kind]) <= set(GE.census(ge_file))
            cache[bucket] = lowered.graph, ge_file
        return cache[bucket]

    model, serial = (fleets.model(variant, experts=case.experts) for variant in (case.variant, replace(case.variant, in_flight=1)))
    options = {"drafts": case.drafts, "emit_logits": not case.logprobs, "max_logprobs": case.logprobs}
    plain = fleets.Fleet(serial, mesh, **options)
    before = fleets.Fleet(model, mesh, form=lambda partitioned: both(partitioned)[0], **options)
    orders = [functools.partial(Interpreter, order=order) for order in ORDERS]
    after = [fleets.Fleet(model, mesh, form=lambda partitioned: both(partitioned)[1], machine=machine, **options) for machine in orders]
    live = (2,) * mesh.axis("dp")
    serving, answers = fleets.Serving(2, case.drafts, live), fleets.answers(model, 2, live, 4 * (case.drafts + 1))
    counts = set()
    for bucket, inputs in serving.steps(3):
        for group, truth in enumerate(answers if bucket.kind == "decode" else ()):
            for pool in (pool for fleet in (plain, before, *after) for pool in fleet.request_slots(group)):
                serving.force(group, pool, truth)
        inputs = [{**own, "logprobs": (own["request_slots"] == 1).int()} for own in inputs]
        want, got, *others = (fleet.step(bucket, inputs) for fleet in (plain, before, *after))
        for group, outputs in enumerate(got):
            sampled, rows = fleets.valid_positions(bucket, inputs[group]), inputs[group]["request_slots"] > 0
            for output, value in outputs.items():
                meant = sampled if value.shape[: sampled.dim()] == sampled.shape else rows
                torch.testing.assert_close(value[meant], want[group][output][meant], rtol=0, atol=2e-4)
                assert all(same(other[group][output], value) for other in others), output
            counts |= {*outputs["counts"][rows].tolist()} if bucket.kind == "decode" else set()
        assert all(equal(fleet.state, before.state) for fleet in after)
        serving.commit(bucket, inputs, want)
    assert counts == set(range(1, case.drafts + 2)), "all that can be accepted was"
    for row, answer in ((row, answer) for pair in zip(serving.output, answers, strict=True) for row, answer in zip(*pair, strict=True)):
        assert row == answer[: len(row)]
