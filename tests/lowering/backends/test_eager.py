"""lowering/backends/eager.py: the eager executable runs a graph node by node, frees values early, and refuses what it cannot run."""

from __future__ import annotations

import gc
import operator
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Bucket, Signature
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.backends.eager import BACKEND, EagerExecutable
from npucompile.lowering.lower import LoweredProgram

aten = torch.ops.aten


def module(graph: Graph) -> GraphModule:
    return GraphModule(torch.nn.Module(), graph)


def arithmetic() -> GraphModule:
    """A graph with lists, tuples, nested lists, keyword arguments, several results and an operand as a result."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = graph.call_function(aten.cat.default, ([x, y], 0))
    parts = graph.call_function(aten.split_with_sizes.default, (both, [1, 3]))
    first, rest = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    wide = graph.call_function(aten._to_copy.default, (first,), {"dtype": torch.float64})
    total = graph.call_function(aten.sum.dim_IntList, (rest, [0]), {"dtype": torch.float64})
    picked = graph.call_function(aten.index.Tensor, (rest, [graph.call_function(aten.arange.default, (2,)), None]))
    graph.output((total, wide, x, picked))
    return module(graph)


def test_runs_the_graph() -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    total, wide, same, picked = EagerExecutable(arithmetic())([x, y])
    assert (total.tolist(), total.dtype) == ([5, 6, 7], torch.float64)
    assert (wide.tolist(), wide.dtype) == ([[0, 1, 2]], torch.float64)
    assert same is x
    assert picked.tolist() == [[3, 4, 5], [1, 1, 1]]


def test_runs_again_and_again() -> None:
    run = EagerExecutable(arithmetic())
    for n in range(3):
        x = torch.full((2, 3), float(n))
        assert run([x, x])[0].tolist() == [3 * n] * 3


def test_updates_operands_in_place() -> None:
    graph = Graph()
    pool, x = graph.placeholder("pool"), graph.placeholder("x")
    old = graph.call_function(aten.mul.Tensor, (pool, 2))
    graph.call_function(aten.copy_.default, (pool, x))
    graph.output((old,))
    state = torch.ones(3)
    (got,) = EagerExecutable(module(graph))([state, torch.full((3,), 7.0)])
    assert (got.tolist(), state.tolist()) == ([2] * 3, [7] * 3)


def test_needs_no_gradient_and_leaves_none() -> None:
    w = torch.ones(2, 3, requires_grad=True)
    results = EagerExecutable(arithmetic())([w, w])
    assert not any(t.requires_grad for t in (results[0], results[1], results[3]))


class Watch:
    """Functions for a graph that keep weak references to their results, and a count of those alive when `count` runs."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def make(self, *sources: Any) -> torch.Tensor:
        value = torch.ones(2)
        self.made.append(weakref.ref(value))
        return value

    def pair(self, source: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.make(source), self.make(source)

    def count(self, source: Any) -> None:
        self.alive.append(sum(ref() is not None for ref in self.made))


def test_values_are_freed_after_their_last_reader() -> None:
    watch, graph = Watch(), Graph()
    x = graph.placeholder("x")

    def call(fn: Any, *args: Any) -> Any:
        return graph.call_function(fn, args)

    a = call(watch.make, x)
    b = call(watch.make, a)
    call(watch.count, x)  # a is read, b is not: b
    c = call(watch.make, b, b)
    call(watch.count, x)  # b is read: c
    d = call(watch.make, [c, (x, c)])
    call(watch.make, x)  # nobody reads it
    call(watch.count, x)  # d
    pair = call(watch.pair, d)
    first = call(operator.getitem, pair, 0)
    call(watch.count, x)  # both, through the pair
    two = call(operator.getitem, pair, 1)
    e = call(watch.make, two)
    call(watch.count, x)  # one, e
    graph.output((first, e))
    results = EagerExecutable(module(graph))([torch.ones(1)])
    assert watch.alive == [1, 1, 1, 2, 2]
    assert sum(ref() is not None for ref in watch.made) == 2
    del results
    assert not any(ref() is not None for ref in watch.made)


def test_a_call_keeps_neither_operands_nor_results() -> None:
    run = EagerExecutable(arithmetic())
    operands = [torch.ones(2, 3), torch.ones(2, 3)]
    results = run(operands)
    refs = [weakref.ref(t) for t in (*operands, *results)]
    del operands, results
    gc.collect()
    assert not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_wrong_number_of_operands_is_refused(n: int) -> None:
    with pytest.raises(LoweringError, match=f"{n} operands, the graph has 2"):
        EagerExecutable(arithmetic())([torch.ones(2, 3)] * n)


def test_a_graph_that_reads_more_than_operands_is_refused() -> None:
    root, graph = torch.nn.Module(), Graph()
    root.register_buffer("table", torch.ones(1))
    graph.output((graph.get_attr("table"),))
    with pytest.raises(LoweringError, match="table is a get_attr of 'table'; everything a graph reads must be an operand"):
        EagerExecutable(GraphModule(root, graph))


# --- as a backend ---


def test_its_file_is_the_graph(tmp_path: Path) -> None:
    path = tmp_path / f"one.{BACKEND.suffix}"
    lowered = LoweredProgram(Bucket("decode", 1, 1), "eager", arithmetic(), Signature((), (), (), ()))
    path.write_bytes(BACKEND.compile(lowered, cache_dir=tmp_path, threads=1).data)
    x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    for got, want in zip(BACKEND.open(path)([x, y]), EagerExecutable(arithmetic())([x, y]), strict=True):
        assert torch.equal(got, want)
    assert (BACKEND.name, BACKEND.options(4)) == ("eager", {})
    assert BACKEND.compiles_here() is BACKEND.runs_here() is None


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"missing.graph"):
        BACKEND.open(tmp_path / "missing.graph")
    (tmp_path / "bad.graph").write_bytes(b"not a graph")
    with pytest.raises(LoweringError, match="not a serialised graph"):
        BACKEND.open(tmp_path / "bad.graph")


def test_a_graph_is_read_back_without_what_partitions_it(tiny_artifact: Path) -> None:
    graph = tiny_artifact / Artifact.open(tiny_artifact).manifest.graphs[0].reference
    code = f"""
import sys
from pathlib import Path
from npucompile.lowering.backend import open_executable
open_executable(Path({str(graph)!r}), "eager")
sys.exit("torch.distributed.tensor" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
