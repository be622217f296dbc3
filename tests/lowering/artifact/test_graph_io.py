"""lowering/artifact/graph_io.py: a graph reads back with the same operators, arguments, values and results; others are refused by name."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs import ops as ops  # registers npuc operators
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.text import as_text
from npucompile.lowering.artifact import graph_io

aten = torch.ops.aten


def traced(fn: Callable[..., Any], *operands: torch.Tensor) -> GraphModule:
    graph = make_fx(fn, tracing_mode="fake")(*operands)
    for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder"):
        node.meta["leaf"] = f"inputs.{i}"
    return graph


def one_call(target: Any, *args: Any, **kwargs: Any) -> GraphModule:
    graph = Graph()
    operand = graph.placeholder("x")
    graph.output((graph.call_function(target, (operand, *args), kwargs),))
    return GraphModule(torch.nn.Module(), graph)


def call_of(graph: GraphModule) -> Node:
    return next(n for n in graph.graph.nodes if n.op == "call_function")


def step(cache: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    new = aten.index_put(cache, [pages, offsets], x)
    top = torch.topk(x.flatten(1), 2)
    half = x.to(torch.float16, memory_format=torch.contiguous_format).transpose(1, 2)
    return new[pages].sum((1, 2)), top.values, top.indices, half, torch.arange(3, dtype=torch.int32), x.clamp(min=-0.5)


OPERANDS = (torch.randn(5, 4, 2, 3), torch.tensor([1, 3]), torch.tensor([0, 2]), torch.randn(2, 2, 3))


def test_a_graph_reads_back_the_same() -> None:
    graph = traced(step, *OPERANDS)
    data = graph_io.encode(graph)
    again = graph_io.decode(data)
    assert graph_io.encode(again) == data
    assert as_text(again, "step") == as_text(graph, "step")
    for want, got in zip(graph(*OPERANDS), again(*OPERANDS), strict=True):
        assert torch.equal(want, got)
        assert want.dtype == got.dtype


def test_values_are_kept_without_tracing() -> None:
    def values(graph: GraphModule) -> list[Any]:
        tensors = []
        for node in graph.graph.nodes:
            many = node.meta.get("val")
            for value in many if isinstance(many, (list, tuple)) else [many]:
                tensors.append(None if value is None else (tuple(value.shape), value.dtype, value.stride()))
        return tensors

    graph = traced(step, *OPERANDS)
    again = graph_io.decode(graph_io.encode(graph))
    assert values(again) == values(graph)
    assert any(value and value[0] == (2, 3, 2) and value[2] == (6, 1, 3) for value in values(again)), "strides of a transpose"
    assert [n.meta["leaf"] for n in again.graph.nodes if n.op == "placeholder"] == [f"inputs.{i}" for i in range(4)]


def test_writing_in_place_is_kept() -> None:
    def update(pool: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        pool.copy_(pool + x)
        return (x * 2,)

    again = graph_io.decode(graph_io.encode(traced(update, torch.zeros(3), torch.zeros(3))))
    pool = torch.zeros(3)
    again(pool, torch.ones(3))
    assert pool.tolist() == [1, 1, 1]


def test_names_do_not_reach_the_bytes() -> None:
    def plain(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.relu(x + 1),)

    first, second = traced(plain, torch.zeros(2)), traced(plain, torch.zeros(2))
    for node in second.graph.nodes:
        node.name = f"other_{node.name}"
    assert graph_io.encode(first) == graph_io.encode(second)


def test_primitives_are_stored_by_name() -> None:
    graph = one_call(torch.ops.npuc.rms_norm.default, 1.0)
    assert call_of(graph_io.decode(graph_io.encode(graph))).target is torch.ops.npuc.rms_norm.default


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
    st.sampled_from([torch.device("cpu"), torch.device("meta"), torch.device("cuda", 3)]),
    st.sampled_from([torch.strided, torch.sparse_coo]),
    st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format]),
)
ARGUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in type and in every bit."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        # FX stores lists in its own list type.
        return isinstance(a, tuple) == isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and bool(a == b)


@given(args=st.lists(ARGUMENTS, max_size=4), kwargs=st.dictionaries(st.sampled_from(["alpha", "dtype", "beta"]), ARGUMENTS))
def test_any_argument_reads_back_exactly(args: list[Any], kwargs: dict[str, Any]) -> None:
    graph = one_call(aten.add.Tensor, *args, **kwargs)
    again = call_of(graph_io.decode(graph_io.encode(graph)))
    assert same(tuple(again.args[1:]), tuple(args))
    assert dict(again.kwargs).keys() == kwargs.keys()
    assert all(same(again.kwargs[key], kwargs[key]) for key in kwargs)


def test_order_of_keywords_does_not_matter() -> None:
    first = one_call(aten.add.Tensor, 1, alpha=2, beta=3)
    second = one_call(aten.add.Tensor, 1, beta=3, alpha=2)
    assert graph_io.encode(first) == graph_io.encode(second)


UNARY = [aten.neg.default, aten.abs.default, aten.exp.default, aten.t.default, aten.sigmoid.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.mm.default]


@given(st.lists(st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 100), st.integers(0, 100)), max_size=12))
def test_any_graph_computes_the_same_after_reading_back(calls: list[tuple[Any, int, int]]) -> None:
    graph = Graph()
    values = [graph.placeholder("a"), graph.placeholder("b")]
    for target, left, right in calls:
        chosen = [values[left % len(values)], values[right % len(values)]]
        values.append(graph.call_function(target, tuple(chosen[: 1 if target in UNARY else 2])))
    graph.output(tuple(values[-3:]))
    module = GraphModule(torch.nn.Module(), graph)
    data = graph_io.encode(module)
    again = graph_io.decode(data)
    assert graph_io.encode(again) == data
    operands = [torch.linspace(-1, 1, 9).reshape(3, 3), torch.eye(3) * 0.5]
    for want, got in zip(module(*operands), again(*operands), strict=True):
        assert torch.equal(want.nan_to_num(7.0), got.nan_to_num(7.0))


# --- refusals ---


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((slice(0, 1),), "slice"),
        ((1 + 2j,), "complex"),
        ((2**64,), "18446744073709551616 does not fit"),
        (([{"a": 1}],), "dict"),
        ((torch.Generator(),), "Generator"),
    ],
)
def test_an_argument_without_a_place_is_refused(args: tuple[Any, ...], message: str) -> None:
    graph = one_call(aten.add.Tensor, 1)
    call_of(graph)._args = (call_of(graph).args[0], *args)
    with pytest.raises(LoweringError, match=rf"node \w+ \(aten.add.Tensor\).*{message}"):
        graph_io.encode(graph)


@pytest.mark.parametrize("target", [torch.add, operator.add, len, torch.nn.functional.linear], ids=lambda t: t.__name__)
def test_a_function_without_a_place_is_refused(target: Any) -> None:
    with pytest.raises(LoweringError, match=rf"{target.__name__}.*legal are operator overloads"):
        graph_io.encode(one_call(target, 1))


def test_what_is_not_an_operand_is_refused() -> None:
    graph = Graph()
    graph.output((graph.get_attr("weight"),))
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(LoweringError, match=r"weight is a get_attr of 'weight'.*must be an operand"):
        graph_io.encode(GraphModule(module, graph))


def packed(*nodes: list[Any], magic: str = graph_io.MAGIC, version: int = graph_io.VERSION) -> bytes:
    data: bytes = msgpack.packb([magic, version, list(nodes)])
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are not a serialised graph"),
        (b"\xc1" * 10, "not a serialised graph"),
        (msgpack.packb(7), "not a serialised graph"),
        (packed(magic="elf"), "'elf' version"),
        (packed(version=99), f"version 99; this reads '{graph_io.MAGIC}' version {graph_io.VERSION}"),
        (packed(["call_function", "aten.no_such_operator.default", ["tuple"], [], None, None]), "'aten.no_such_operator.default'"),
        (packed(["call_function", "os.system.default", ["tuple"], [], None, None]), "'os.system.default'"),
        (packed(["call_function", "operator.add", ["tuple"], [], None, None]), "'operator.add'"),
        (packed(["call_module", None, ["tuple"], [], None, None]), "node 0.*no kind of node"),
        (packed(["output", None, ["tuple", ["node", 5]], [], None, None]), "node 0.*cannot be read"),
        (packed(["output", None, ["tuple", ["dtype", "save"]], [], None, None]), "'save' is no dtype"),
        (packed(["placeholder"]), "node 0.*cannot be read"),
    ],
)
def test_bytes_that_are_no_graph_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        graph_io.decode(data)


WHOLE = graph_io.encode(traced(step, *OPERANDS))


@given(st.integers(0, len(WHOLE) - 1))
def test_a_truncated_graph_is_refused(length: int) -> None:
    with pytest.raises(LoweringError):
        graph_io.decode(WHOLE[:length])
