"""graphs/passes/optimise.py: the driver works on a copy, checks invariants after every pass, and names the pass that broke one."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from npucompile.graphs import ops
from npucompile.graphs.errors import InvariantError
from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.passes import PASSES
from npucompile.graphs.passes.base import Pass
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.text import as_text
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree


def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    x = torch.sigmoid(ops.linear(i["x"], p["w"])) + torch.sigmoid(ops.linear(i["x"], p["w"]))
    return {"y": x}, {"s": s["s"] + x.sum()}


@pytest.fixture
def partitioned() -> PartitionedProgram:
    f32 = torch.float32
    program = Program("toy", Bucket("decode", 2, 1), forward, {"w": Aval((5, 3), f32)}, {"s": Aval((4,), f32)}, {"x": Aval((2, 3), f32)})
    return partition(trace(program), Mesh(), Rules())


def test_smaller_and_equal(partitioned: PartitionedProgram) -> None:
    before = as_text(partitioned.graph, "")
    smaller = optimise(partitioned)
    assert as_text(partitioned.graph, "") == before, "works on a copy"
    operations = [line.split("= ")[1].split("(")[0] for line in as_text(smaller.graph, "").splitlines() if "(" in line]
    assert operations == ["npuc.linear", "aten.sigmoid", "aten.add.Tensor", "aten.sum", "aten.add.Tensor"]
    operands = [torch.randn(leaf.aval.shape, generator=torch.Generator().manual_seed(0)) for leaf in partitioned.signature.operands]
    for got, want in zip(smaller.graph(*operands), partitioned.graph(*operands), strict=True):
        assert torch.equal(got, want)
    assert smaller.signature is partitioned.signature


def breaks_the_dtype(graph: GraphModule) -> None:
    (*_, output) = graph.graph.nodes
    with graph.graph.inserting_before(output):
        half = graph.graph.call_function(torch.ops.aten._to_copy.default, (output.args[0][0],), {"dtype": torch.float16})
    half.meta["val"] = output.args[0][0].meta["val"].half()
    output.args = ((half, *output.args[0][1:]),)


def breaks_the_order(graph: GraphModule) -> None:
    first = next(n for n in graph.graph.nodes if n.op == "call_function" and len(n.users) > 0)
    last = list(first.users)[-1]
    last.append(first)


def captures(graph: GraphModule) -> None:
    graph.register_buffer("table", torch.ones(1))
    (*_, output) = graph.graph.nodes
    with graph.graph.inserting_before(output):
        graph.graph.get_attr("table").meta["val"] = graph.table


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (breaks_the_dtype, r"after pass 'saboteur' .*\n  results_follow_signature: result outputs.y is"),
        (breaks_the_order, "after pass 'saboteur' the graph is not well formed: .* used before it has been defined"),
        (captures, r"after pass 'saboteur' .*\n  nothing_from_the_air"),
    ],
)
@pytest.mark.parametrize("place", range(len(PASSES) + 1))
def test_the_pass_that_broke_the_graph_is_named(partitioned: PartitionedProgram, run: object, message: str, place: int) -> None:
    passes = list(PASSES)
    passes.insert(place, Pass("saboteur", run))  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match=message):
        optimise(partitioned, passes)


def test_a_graph_that_came_broken_is_no_pass_s_fault(partitioned: PartitionedProgram) -> None:
    captures(partitioned.graph)
    with pytest.raises(InvariantError, match=r"after partition .*\n  nothing_from_the_air"):
        optimise(partitioned)


# --- bodies ---


def layer(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.sigmoid(ops.linear(x, w)) + torch.sigmoid(ops.linear(x, w))
    return y @ torch.ones(5, 3), y.sum(0)


def stacked(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
    x = i["x"]
    for _ in range(2):
        x, _ = block("layer", layer, (), p["w"], x)
    return {"y": x}, {"s": s["s"] + x.sum()}


@pytest.fixture
def layered() -> PartitionedProgram:
    f32 = torch.float32
    program = Program("toy", Bucket("decode", 2, 1), stacked, {"w": Aval((5, 3), f32)}, {"s": Aval((4,), f32)}, {"x": Aval((2, 3), f32)})
    return partition(trace(program), Mesh(), Rules())


def test_bodies_become_smaller_once_for_all_their_calls(layered: PartitionedProgram) -> None:
    before = as_text(layered.graph, "")
    smaller = optimise(layered)
    assert as_text(layered.graph, "") == before, "works on a copy, of bodies too"
    ((name, body),) = bodies(smaller.graph).items()
    assert name == "layer"
    operations = [line.split("= ")[1].split("(")[0] for line in as_text(body, "").splitlines() if "(" in line]
    assert operations == ["npuc.linear", "aten.sigmoid", "aten.add.Tensor", "aten.ones", "aten.mm"], "and the sum that nobody reads is gone"
    operands = [torch.randn(leaf.aval.shape, generator=torch.Generator().manual_seed(0)) for leaf in layered.signature.operands]
    for got, want in zip(smaller.graph(*operands), layered.graph(*operands), strict=True):
        assert torch.equal(got, want)


def breaks_a_body(graph: GraphModule) -> None:
    if bodies(graph):
        return
    (*_, output) = graph.graph.nodes
    with graph.graph.inserting_before(output):
        graph.graph.call_function(torch.relu, (output.args[0][0],)).meta["val"] = output.args[0][0].meta["val"]


def test_the_pass_that_broke_a_body_is_named(layered: PartitionedProgram) -> None:
    saboteur = Pass("saboteur", breaks_a_body)
    with pytest.raises(InvariantError, match=r"after pass 'saboteur' .*\n  operators_are_known: in layer: "):
        optimise(layered, [*PASSES, saboteur])
