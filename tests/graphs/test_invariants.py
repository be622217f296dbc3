"""graphs/invariants.py: for every invariant a graph that breaks it; the error names the invariant, the node and the legal form."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs import ops
from npucompile.graphs.errors import InvariantError
from npucompile.graphs.invariants import INVARIANTS, OF_BODIES, check, results_of
from npucompile.graphs.types import Aval, Leaf, Signature

aten = torch.ops.aten
F32 = torch.float32
ONE = Aval((2, 3), F32)
SIGNATURE = Signature((Leaf("params.w", ONE),), (Leaf("state.s", ONE),), (Leaf("inputs.x", ONE),), (Leaf("outputs.y", ONE),))


class Build:
    """A graph of three placeholders w, s, x, made node by node."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.root = torch.nn.Module()
        self.w, self.s, self.x = (self.add("placeholder", name) for name in "wsx")

    def add(self, op: str, target: Any, *args: Any, like: torch.Tensor | None = None) -> Node:
        node = self.graph.create_node(op, target, args)
        node.meta["val"] = torch.empty(2, 3, device="meta") if like is None else like
        return node

    def call(self, target: Any, *args: Any, like: torch.Tensor | None = None) -> Node:
        return self.add("call_function", target, *args, like=like)

    def end(self, *results: Any) -> GraphModule:
        self.graph.output(tuple(results))
        return GraphModule(self.root, self.graph)


def legal(b: Build) -> GraphModule:
    both = b.call(aten.add.Tensor, b.x, b.w)
    top = b.call(ops.moe_route.op, both, 1, True)
    share = b.call(operator.getitem, top, 0, like=torch.empty(2, 1, device="meta"))
    rows = b.call(aten.index.Tensor, b.s, [share])
    return b.end(b.call(aten.mul.Tensor, both, share), b.call(aten.add.Tensor, b.s, rows))


def an_operand_too_many(b: Build) -> GraphModule:
    b.add("placeholder", "z")
    return b.end(b.x, b.s)


def an_operand_of_another_shape(b: Build) -> GraphModule:
    b.w.meta["val"] = torch.empty(3, 2, device="meta")
    return b.end(b.x, b.s)


def an_operand_of_another_dtype(b: Build) -> GraphModule:
    b.s.meta["val"] = b.s.meta["val"].bfloat16()
    return b.end(b.x, b.call(aten.add.Tensor, b.s, b.x))


def a_result_too_few(b: Build) -> GraphModule:
    return b.end(b.x)


def a_result_of_another_dtype(b: Build) -> GraphModule:
    return b.end(b.call(aten._to_copy.default, b.x, like=torch.empty(2, 3, dtype=torch.float16, device="meta")), b.s)


def a_result_that_is_no_node(b: Build) -> GraphModule:
    return b.end(None, b.s)


def a_captured_tensor(b: Build) -> GraphModule:
    b.root.register_buffer("table", torch.ones(2, 3))
    return b.end(b.call(aten.add.Tensor, b.x, b.add("get_attr", "table")), b.s)


def a_submodule(b: Build) -> GraphModule:
    b.root.add_module("inner", torch.nn.ReLU())
    return b.end(b.add("call_module", "inner", b.x), b.s)


def a_body_that_is_not_there(b: Build) -> GraphModule:
    b.root.add_module("inner", torch.nn.Module())
    graph = b.end(b.add("call_module", "inner", b.x), b.s)
    graph.inner = torch.nn.Sequential()
    return graph


def a_method(b: Build) -> GraphModule:
    return b.end(b.add("call_method", "relu", b.x), b.s)


def a_python_function(b: Build) -> GraphModule:
    return b.end(b.call(torch.relu, b.x), b.s)


def an_operator_of_somebody_else(b: Build) -> GraphModule:
    return b.end(b.call(torch.ops.prims.sin.default, b.x), b.s)


def an_operator_gone_from_the_table(b: Build) -> GraphModule:
    b.call(ops.cache_write.inplace_op, b.s, b.s, b.x, b.x, b.w)
    return b.end(b.x, b.s)


def a_symbolic_size(b: Build) -> GraphModule:
    symbolic = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(4, 5))
    (node,) = (n for n in symbolic.graph.nodes if n.op == "call_function")
    return b.end(b.call(aten.sum.default, b.call(aten.add.Tensor, b.x, 1, like=node.meta["val"])), b.s)


def reads(target: Any) -> Callable[[Build], GraphModule]:
    def graph(b: Build) -> GraphModule:
        b.call(target, b.x)
        return b.end(b.x, b.s)

    return graph


def an_operator_that_writes(b: Build) -> GraphModule:
    b.call(aten.copy_.default, b.s, b.x)
    return b.end(b.x, b.s)


def two_pools_in_one_value(b: Build) -> GraphModule:
    return b.end(b.x, b.w, b.w)


BROKEN: list[tuple[str, Callable[[Build], GraphModule], str]] = [
    ("operands_follow_signature", an_operand_too_many, "4 placeholders, the signature has 3 operands"),
    ("operands_follow_signature", an_operand_of_another_shape, r"placeholder params.w is .*3, 2.*, the signature says f32\[2,3\]"),
    ("operands_follow_signature", an_operand_of_another_dtype, r"placeholder state.s is .*bfloat16.*, the signature says f32\[2,3\]"),
    ("results_follow_signature", a_result_too_few, "1 results, the signature has 2"),
    ("results_follow_signature", a_result_of_another_dtype, r"result outputs.y is .*float16.*, the signature says f32\[2,3\]"),
    ("results_follow_signature", a_result_that_is_no_node, r"result outputs.y is None, the signature says f32\[2,3\]"),
    ("nothing_from_the_air", a_captured_tensor, "get_attr of 'table'; everything a graph reads must be an operand"),
    ("nothing_from_the_air", a_submodule, "call_module of 'inner'"),
    ("nothing_from_the_air", a_body_that_is_not_there, "call_module of 'inner'"),
    ("nothing_from_the_air", a_method, "call_method of 'relu'"),
    ("operators_are_known", a_python_function, "which is not a registered operator"),
    ("operators_are_known", an_operator_of_somebody_else, "calls prims.sin.default; legal namespaces are"),
    ("operators_are_known", an_operator_gone_from_the_table, "calls npuc.cache_write_.default; legal namespaces are"),
    ("shapes_are_static", a_symbolic_size, "sizes must be integers at build time"),
    *(
        ("nothing_depends_on_the_host", reads(target), "which reads a value back to the host")
        for target in (
            aten._local_scalar_dense.default,
            aten.nonzero.default,
            aten.masked_select.default,
            aten._unique2.default,
            aten.equal.default,
            aten.bincount.default,
            aten.repeat_interleave.Tensor,
        )
    ),
    *(
        ("nothing_depends_on_the_host", reads(target), "which draws random numbers; they are inputs")
        for target in (
            aten.rand.default,
            aten.randn_like.default,
            aten.randint.low,
            aten.bernoulli.default,
            aten.native_dropout.default,
            aten.normal_.default,
            aten.log_normal_.default,
            aten.random_.default,
            aten.multinomial.default,
        )
    ),
    ("nothing_is_mutated", an_operator_that_writes, "calls aten.copy_.default, which writes its operand"),
]


@pytest.mark.parametrize(("invariant", "make", "message"), BROKEN, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(BROKEN)])
def test_a_broken_graph_is_named(invariant: str, make: Callable[[Build], GraphModule], message: str) -> None:
    with pytest.raises(InvariantError, match=message) as caught:
        check(make(Build()), SIGNATURE, "pass 'shuffle'")
    lines = str(caught.value).splitlines()
    assert lines[0] == "after pass 'shuffle' the graph is not legal:"
    assert any(line.startswith(f"  {invariant}: ") for line in lines[1:])


def test_state_leaves_need_results_of_their_own() -> None:
    second = Signature(SIGNATURE.params, (Leaf("state.a", ONE), Leaf("state.b", ONE)), (), SIGNATURE.outputs)
    with pytest.raises(InvariantError, match="state_is_replaced: two state leaves end as the same value"):
        check(two_pools_in_one_value(Build()), second, "partition")


def test_every_breach_is_listed() -> None:
    def worst(b: Build) -> GraphModule:
        b.call(aten.copy_.default, b.s, b.x)
        b.call(torch.relu, b.x)
        b.call(aten.rand.default, [3])
        return b.end(b.x)

    with pytest.raises(InvariantError) as caught:
        check(worst(Build()), SIGNATURE, "partition")
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "results_follow_signature",
        "operators_are_known",
        "nothing_depends_on_the_host",
        "nothing_is_mutated",
    ]


def test_every_invariant_has_a_breaking_graph() -> None:
    elsewhere = {"state_is_replaced"}  # its graph needs two state leaves: test_state_leaves_need_results_of_their_own
    assert {invariant for invariant, _, _ in BROKEN} | elsewhere == {rule.__name__ for rule in INVARIANTS}


def test_a_legal_graph_passes() -> None:
    graph = legal(Build())
    check(graph, SIGNATURE, "partition")
    assert [n.target for n in results_of(graph)] == [aten.mul.Tensor, aten.add.Tensor]


# --- bodies ---


def calling(b: Build, inner: GraphModule) -> GraphModule:
    """A graph that calls a body of one operand and one result."""
    b.root.layer = inner
    call = b.add("call_module", "layer", b.x)
    call.meta["val"] = (b.x.meta["val"],)
    return b.end(b.call(operator.getitem, call, 0), b.call(aten.add.Tensor, b.s, 1))


def body(make: Callable[[Build], Node]) -> GraphModule:
    b = Build()
    for operand in (b.w, b.s):
        b.graph.erase_node(operand)
    return b.end(make(b))


def captured(b: Build) -> Node:
    b.root.register_buffer("table", torch.ones(2, 3))
    return b.add("get_attr", "table")


def symbolic(b: Build) -> Node:
    (node,) = (n for n in a_symbolic_size(Build()).graph.nodes if n.target is aten.add.Tensor)
    return b.call(aten.add.Tensor, b.x, 1, like=node.meta["val"])


BROKEN_BODIES: list[tuple[str, Callable[[Build], Node]]] = [
    ("nothing_from_the_air", captured),
    ("operators_are_known", lambda b: b.call(torch.relu, b.x)),
    ("shapes_are_static", symbolic),
    ("nothing_depends_on_the_host", lambda b: b.call(aten.nonzero.default, b.x)),
    ("nothing_is_mutated", lambda b: b.call(aten.add_.Tensor, b.x, 1)),
]


@pytest.mark.parametrize(("invariant", "make"), BROKEN_BODIES, ids=[name for name, _ in BROKEN_BODIES])
def test_a_broken_body_breaks_its_graph(invariant: str, make: Callable[[Build], Node]) -> None:
    with pytest.raises(InvariantError) as caught:
        check(calling(Build(), body(make)), SIGNATURE, "partition")
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"  {invariant}: in layer: ")


def test_every_invariant_of_bodies_has_a_breaking_body() -> None:
    assert [name for name, _ in BROKEN_BODIES] == [rule.__name__ for rule in OF_BODIES]


def test_calls_of_legal_bodies_are_legal() -> None:
    check(calling(Build(), body(lambda b: b.call(aten.relu.default, b.x))), SIGNATURE, "partition")
