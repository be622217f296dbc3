"""graphs/ir/outline.py: code between calls becomes bodies, so that the main graph contains calls only (test_flatten.py compares values)."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.ir.outline import outline
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Bucket, Program, Tree

X, Y = torch.arange(12.0).view(3, 4), torch.ones(3, 4) / 3


def graph_of(step: Any) -> GraphModule:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return step(*i), s

    aval = Aval((3, 4), torch.float32)
    return trace(Program("toy", Bucket("decode", 3, 1), forward, {}, {}, [aval, aval])).graph


def outlined(step: Any) -> GraphModule:
    """The outlined graph, checked to compute what `step` does and to leave the traced graph unchanged."""
    graph = graph_of(step)
    before = as_text(graph, "")
    outlined_graph = outline(graph)
    assert as_text(graph, "") == before
    outlined_graph.graph.lint()
    assert {n.target for n in outlined_graph.graph.nodes if n.op == "call_function"} <= {operator.getitem}
    for got, want in zip(outlined_graph(X, Y), step(X, Y), strict=True):
        assert torch.equal(got, want)
    return outlined_graph


def layer(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, x * y


def called(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return block("layer", layer, (), x, y)


def order(graph: GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_module"]


def everywhere(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    early = x * 2
    a, b = called(early + 1, y)
    middle = a.relu()
    c, d = called(middle, b)
    e, f = called(c + 1, d)
    return [e + early, f]


def test_runs_are_named_by_where_they_lie() -> None:
    outlined_graph = outlined(everywhere)
    assert order(outlined_graph) == ["prologue", "layer", "between_1", "layer", "between_2", "layer", "epilogue"]
    assert list(bodies(outlined_graph)) == ["prologue", "layer", "between_1", "between_2", "epilogue"]


def test_a_body_gives_what_is_read_outside_it_and_takes_what_it_reads() -> None:
    outlined_graph = outlined(everywhere)
    ops = {
        name: [str(n.target).removeprefix("aten.").partition(".")[0] for n in body.graph.nodes if n.op == "call_function"]
        for name, body in bodies(outlined_graph).items()
    }
    assert ops["prologue"] == ["mul", "add"]
    assert ops["epilogue"] == ["add"]
    sizes = {
        name: (sum(n.op == "placeholder" for n in body.graph.nodes), len(body.graph.output_node().args[0]))
        for name, body in bodies(outlined_graph).items()
    }
    assert sizes == {"prologue": (1, 2), "layer": (2, 2), "between_1": (1, 1), "between_2": (1, 1), "epilogue": (2, 1)}
    nodes = [n for body in (outlined_graph, *bodies(outlined_graph).values()) for n in body.graph.nodes if n.op != "output"]
    assert all("val" in n.meta for n in nodes)


@pytest.mark.parametrize(
    ("step", "names"),
    [
        (lambda x, y: [x + y, y * 2], ["prologue"]),
        (lambda x, y: list(called(x, y)), ["layer"]),
        (lambda x, y: [*called(x, y), x + 1], ["layer", "epilogue"]),
        (lambda x, y: list(called(x + 1, y)), ["prologue", "layer"]),
        (lambda x, y: [x, y, x], []),
        (lambda x, y: [x, *called(y, y)], ["layer"]),
    ],
    ids=["no calls", "calls only", "no prologue", "no epilogue", "nothing", "an operand is a result"],
)
def test_what_is_not_there_is_not_made(step: Any, names: list[str]) -> None:
    assert order(outlined(step)) == names


def test_names_that_are_taken_are_not_given_again() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a, b = block("prologue", layer, (), x + 1, y)
        return [a * 2, b]

    assert order(outlined(step)) == ["prologue_2", "prologue", "epilogue"]
