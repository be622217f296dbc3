"""lowering/backends/inductor/program.py: a program of calls computes what its graph computes and frees each value where it is read last."""

from __future__ import annotations

import operator
import struct
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node

from npucompile.lowering.backends.inductor.program import UNREAD, BodyProgram, one_call, program_of

OPERANDS = 3
BODIES = {"a": (1, 1), "b": (2, 3), "c": (3, 2), "d": (0, 1)}
"""Number of operands and results of each body."""


@st.composite
def graphs(draw: st.DrawFn) -> GraphModule:
    """A graph of calls whose operands are drawn from all values so far, and some of whose results nobody unpacks."""
    graph, root = Graph(), torch.nn.Module()
    for name in BODIES:
        setattr(root, name, torch.nn.Identity())
    values = [graph.placeholder(f"x{i}") for i in range(OPERANDS)]
    for name in draw(st.lists(st.sampled_from(sorted(BODIES)), max_size=8)):
        takes, gives = BODIES[name]
        call = graph.call_module(name, tuple(draw(st.sampled_from(values)) for _ in range(takes)))
        call.meta["val"] = (None,) * gives
        for place in draw(st.lists(st.integers(0, gives - 1), max_size=gives + 1)):
            values.append(graph.call_function(operator.getitem, (call, place)))
    graph.output(tuple(draw(st.lists(st.sampled_from(values), max_size=4))))
    return GraphModule(root, graph)


def called(graph: GraphModule) -> list[str]:
    return sorted({str(node.target) for node in graph.graph.nodes if node.op == "call_module"})


def computed(body: str, place: int, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    return body, place, operands


def meant(graph: GraphModule) -> list[Any]:
    values: dict[Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = node.name
        elif node.op == "call_module":
            values[node] = [computed(node.target, i, tuple(values[a] for a in node.args)) for i in range(BODIES[node.target][1])]
        elif node.op == "call_function":
            values[node] = values[node.args[0]][node.args[1]]
        else:
            return [values[result] for result in node.args[0]]
    raise AssertionError


def run(program: BodyProgram, names: list[str], operands: list[Any]) -> list[Any]:
    """Runs a program as stitched.cpp does; a value that was given away is gone."""
    held: dict[int, Any] = dict(enumerate(operands))

    def read(value: int, last: bool) -> Any:
        return held.pop(value) if last else held[value]

    for call in program.calls:
        takes = tuple(read(*one) for one in call.reads)
        for place, value in enumerate(call.results):
            if value != UNREAD:
                assert value not in held
                held[value] = computed(names[call.body], place, takes)
    results = [read(*one) for one in program.results]
    assert set(held) <= set(range(program.inputs)), "every value that a call computed was given to its last reader"
    return results


@given(graphs())
def test_a_program_computes_what_its_graph_computes(graph: GraphModule) -> None:
    names = called(graph)
    program = program_of(graph, {name: number for number, name in enumerate(names)})
    assert run(program, names, [f"x{i}" for i in range(OPERANDS)]) == meant(graph)


@given(graphs())
def test_the_encoded_program_is_read_back_number_by_number(graph: GraphModule) -> None:
    names = called(graph)
    program = program_of(graph, {name: number for number, name in enumerate(names)})
    data = program.encode()
    numbers = iter(struct.unpack(f"<{len(data) // 4}i", data))

    def take(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    _, version, inputs, results, values, bodies = take(6)
    assert (version, inputs, results, values) == (1, program.inputs, len(program.results), program.values)
    sizes = [take(2) for _ in range(bodies)]
    for call in [program.calls[i] for i in range(take(1)[0])]:
        assert take(1) == [call.body]
        takes, gives = sizes[call.body]
        assert take(2 * takes) == [int(number) for read in call.reads for number in read]
        assert take(gives) == list(call.results)
    assert take(2 * results) == [int(number) for read in program.results for number in read]
    assert not list(numbers)


def test_a_single_body_is_called_with_everything() -> None:
    assert run(one_call(2, 1), ["a"], ["x", "y"]) == [computed("a", 0, ("x", "y"))]
