"""Each pass makes one kind of change to a small graph, and none changes what a random graph computes."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.passes import PASSES, drop_dead, drop_noops, drop_unread, merge_equal
from npucompile.graphs.passes.base import Pass
from npucompile.graphs.text import target_name
from npucompile.graphs.types import Aval, Bucket, Program, Tree

aten = torch.ops.aten
X = torch.arange(6.0).view(2, 3)
Function = Callable[..., tuple[torch.Tensor, ...]]


def graph_of(fn: Function, *values: torch.Tensor) -> GraphModule:
    return make_fx(fn)(*(values or (X,)))


def calls(graph: GraphModule) -> list[str]:
    return [target_name(n.target).removeprefix("aten.") for n in graph.graph.nodes if n.op == "call_function"]


def after(step: Pass, fn: Function, *values: torch.Tensor) -> GraphModule:
    """The graph of `fn` after one pass, checked to still compute `fn`."""
    values = values or (X,)
    graph = graph_of(fn, *values)
    step.run(graph)
    graph.graph.lint()
    graph.recompile()
    for got, want in zip(graph(*values), fn(*values), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return graph


# --- drop_noops ---


@pytest.mark.parametrize(
    "noop",
    [
        lambda x: aten.alias(x),
        lambda x: aten.detach(x),
        lambda x: aten.view(x, [2, 3]),
        lambda x: aten.view(x, [2, -1]),
        lambda x: aten._unsafe_view(x, [2, 3]),
        lambda x: aten.expand(x, [2, 3]),
        lambda x: aten.expand(x, [-1, 3]),
        lambda x: aten._to_copy(x, dtype=torch.float32),
        lambda x: aten._to_copy(x),
    ],
)
def test_operators_that_do_nothing_go(noop: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert calls(after(drop_noops.PASS, lambda x: (noop(noop(x)) + 1,))) == ["add.Tensor"]


@pytest.mark.parametrize(
    "op",
    [
        lambda x: aten.view(x, [3, 2]),
        lambda x: aten.expand(x, [4, 2, 3]),
        lambda x: aten._to_copy(x, dtype=torch.float64),
        lambda x: aten._to_copy(x.t(), dtype=torch.float32, memory_format=torch.contiguous_format),
        lambda x: aten.clone(x),
        lambda x: aten.t(x),
    ],
)
def test_operators_that_do_something_stay(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = calls(graph_of(lambda x: (op(x),)))
    assert calls(after(drop_noops.PASS, lambda x: (op(x),))) == before


def test_a_dropped_operator_that_is_a_result_gives_its_operand() -> None:
    assert calls(after(drop_noops.PASS, lambda x: (aten.alias(x), aten.view(x + 1, [2, 3])))) == ["add.Tensor"]


# --- merge_equal ---


def test_equal_nodes_become_one() -> None:
    graph = after(merge_equal.PASS, lambda x: ((x + 1) * (x + 1) + torch.relu(x + 1),))
    assert calls(graph) == ["add.Tensor", "mul.Tensor", "relu", "add.Tensor"]


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0, False), (0.0, -0.0), (2, 3)])
def test_arguments_that_only_look_equal_are_different(one: object, other: object) -> None:
    x = torch.tensor([[0.0, -0.0, 3.0]])
    graph = after(merge_equal.PASS, lambda x: (aten.reciprocal(aten.mul(x, one)), aten.reciprocal(aten.mul(x, other))), x)
    assert calls(graph).count("mul.Tensor") == 2


def test_keyword_arguments_count() -> None:
    graph = after(merge_equal.PASS, lambda x: (aten._to_copy(x, dtype=torch.float64) + aten._to_copy(x, dtype=torch.float16),))
    assert calls(graph).count("_to_copy") == 2


def test_each_collective_is_a_rendezvous() -> None:
    graph = graph_of(lambda x: (x + 1,))
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    with graph.graph.inserting_after(node):
        reduced = [graph.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (node, "sum", "0")) for _ in range(2)]
    with graph.graph.inserting_after(reduced[0]):
        both = graph.graph.call_function(aten.add.Tensor, (reduced[1], reduced[0]))
    node.graph.output_node().args = ((both,),)
    merge_equal.run(graph)
    assert calls(graph).count("_c10d_functional.all_reduce") == 2


def test_equal_results_stay_two_values() -> None:
    """Two pools with equal new values stay two results."""
    graph = after(merge_equal.PASS, lambda x: (torch.zeros(2), torch.zeros(2), x + torch.zeros(2, 1)))
    results = graph.graph.output_node().args[0]
    assert len(set(results)) == 3


# --- drop_dead ---


def test_unread_chains_go_and_operands_stay() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.relu(torch.sin(y) + 1).split(1)
        return (x + 1,)

    graph = after(drop_dead.PASS, fn, X, X)
    assert calls(graph) == ["add.Tensor"]
    assert sum(n.op == "placeholder" for n in graph.graph.nodes) == 2


def test_writes_stay() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y.copy_(x)
        return (x + 1,)

    assert "copy_" in calls(after(drop_dead.PASS, fn, X, X.clone()))


# --- drop_unread ---


def three(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.relu(x), torch.sin(x) * 2, x + 1


def called(*reads: tuple[int, ...]) -> GraphModule:
    """Successive calls of `three`; the sum of the results that are read is the next call's operand."""

    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        x = i["x"]
        for wanted in reads:
            results = block("three", three, (), x)
            x = sum((results[n] for n in wanted), x)
        return {"y": x}, s

    return trace(Program("toy", Bucket("decode", 2, 1), forward, {}, {}, {"x": Aval((2, 3), torch.float32)})).graph


def unread_dropped(*reads: tuple[int, ...]) -> GraphModule:
    graph = called(*reads)
    want = graph(X)
    drop_unread.run(graph)
    graph.graph.lint()
    for part in (graph, *bodies(graph).values()):
        part.recompile()
        sizes = [len(n.meta["val"]) for n in part.graph.nodes if n.op == "call_module"]
        assert len(set(sizes)) <= 1
    for got, expected in zip(graph(X), want, strict=True):
        assert torch.equal(got, expected)
    return graph


@pytest.mark.parametrize(
    ("reads", "left"),
    [
        ([(0,)], ["relu"]),
        ([(1,)], ["sin", "mul.Tensor"]),
        ([(2, 0)], ["relu", "add.Tensor"]),
        ([(0,), (2,)], ["relu", "add.Tensor"]),
        ([(0, 1, 2)], ["relu", "sin", "mul.Tensor", "add.Tensor"]),
    ],
)
def test_bodies_lose_what_no_call_reads(reads: list[tuple[int, ...]], left: list[str]) -> None:
    graph = unread_dropped(*reads)
    body = bodies(graph)["three"]
    assert calls(body) == left
    num_read = len({n for one in reads for n in one})
    assert len(body.graph.output_node().args[0]) == num_read
    assert {len(n.meta["val"]) for n in graph.graph.nodes if n.op == "call_module"} == {num_read}


def test_a_result_that_only_dead_nodes_unpack_is_unread() -> None:
    graph = called((0,))
    call = next(n for n in graph.graph.nodes if n.op == "call_module")
    with graph.graph.inserting_after(call):
        graph.graph.call_function(operator.getitem, (call, 1))
    drop_unread.run(graph)
    assert calls(bodies(graph)["three"]) == ["relu"]


# --- all of them ---


OPERATIONS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * 2.0,
    lambda a, b: a * 2,
    lambda a, b: aten.mul(a, -0.0),
    lambda a, b: aten.mul(a, 0.0),
    lambda a, b: aten.alias(a),
    lambda a, b: aten.view(a, [3, 3]),
    lambda a, b: aten.view(a, [9]).view(3, 3),
    lambda a, b: aten._to_copy(a, dtype=torch.float32),
    lambda a, b: aten._to_copy(a, dtype=torch.bfloat16).float(),
    lambda a, b: a.clone(),
    lambda a, b: a.t(),
    lambda a, b: torch.cat([a.split(1)[1], b.split(1)[0], a.split(1)[1]]),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: aten.expand(a, [3, 3]),
    lambda a, b: torch.zeros(3, 3),
    lambda a, b: 1 / a,
]


STEP = st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 99), st.integers(0, 99))


@settings(max_examples=60)
@given(st.lists(STEP, min_size=1, max_size=12), st.integers(1, 4))
def test_random_graphs_compute_the_same(steps: list[tuple[int, int, int]], results: int) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y]
        for op, a, b in steps:
            values.append(OPERATIONS[op](values[a % len(values)].contiguous(), values[b % len(values)].contiguous()))
        return tuple(values[-results:])

    operands = (torch.tensor([[1.0, -0.0, 0.5], [2.0, 3.0, -1.0], [0.0, 7.0, 0.25]]), torch.full((3, 3), 1.5))
    graph = graph_of(fn, *operands)
    want, size = graph(*operands), len(graph.graph.nodes)
    for step in PASSES:
        step.run(graph)
        graph.graph.lint()
        graph.recompile()
        for got, expected in zip(graph(*operands), want, strict=True):
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), step.name
    assert len(graph.graph.nodes) <= size
    once = len(graph.graph.nodes)
    for step in PASSES:
        step.run(graph)
    assert len(graph.graph.nodes) == once, "a second round finds nothing"
