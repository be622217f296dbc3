"""graphs/ir/block.py: a repeated part is traced once per kind, computes what inlined code computes, and reads only its operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from npucompile.graphs import ops
from npucompile.graphs.errors import GraphError
from npucompile.graphs.invariants import check
from npucompile.graphs.ir.block import block
from npucompile.graphs.ir.flatten import bodies
from npucompile.graphs.ir.trace import TracedProgram, trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.layout import constrain
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.spmd.region import Sum, axis_index, shard_map
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules, Tree
from npucompile.lowering.ascend.emulator.interpreter import Interpreter

F32 = torch.float32
X = torch.arange(24.0).view(4, 6) / 7
Step = Callable[[Tree, torch.Tensor], Any]
SEEN: list[str] = []


def program(step: Step, **params: Aval) -> Program:
    def forward(p: Tree, s: Tree, i: Tree) -> tuple[Tree, Tree]:
        return {"y": step(p, i["x"])}, s

    return Program("toy", Bucket("decode", 4, 1), forward, params, {}, {"x": Aval((4, 6), F32)})


def traced(step: Step, **params: Aval) -> TracedProgram:
    SEEN.clear()
    return trace(program(step, **params))


def calls(graph: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_module"]


def scaled(factor: float, x: torch.Tensor) -> torch.Tensor:
    SEEN.append("scaled")
    return torch.sin(x) * factor


def pair(x: torch.Tensor, both: Tree) -> tuple[torch.Tensor, Tree]:
    SEEN.append("pair")
    return x + both["a"], {"b": [both["a"] * 2, (x.sum(0),)], "same": x}


# --- one body a kind ---


def test_equal_calls_share_one_trace() -> None:
    def step(p: Tree, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = block("layer", scaled, (2.0,), x)
        return x

    stage = traced(step)
    assert SEEN == ["scaled"]
    assert calls(stage.graph) == ["layer"] * 5
    assert list(bodies(stage.graph)) == ["layer"]
    want = step({}, X)
    assert SEEN == ["scaled"] * 6, "outside tracing a block is its function"
    assert torch.equal(stage.graph(X)[0], want)


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((scaled, (2.0,), lambda x: x), (scaled, (3.0,), lambda x: x)),
        ((scaled, (2.0,), lambda x: x), (scaled, (2,), lambda x: x)),
        ((scaled, (1,), lambda x: x), (scaled, (True,), lambda x: x)),
        ((scaled, (0.0,), lambda x: x), (scaled, (-0.0,), lambda x: x)),
        ((scaled, (2.0,), lambda x: x), (scaled, (2.0,), lambda x: x[:2])),
        ((scaled, (2.0,), lambda x: x), (scaled, (2.0,), lambda x: x.bfloat16())),
        ((scaled, (2.0,), lambda x: x[:, :4]), (scaled, (2.0,), lambda x: x.t()[:4].t())),
        ((scaled, (2.0,), lambda x: x[:, :4].contiguous()), (scaled, (2.0,), lambda x: x[:, :4])),
        ((scaled, (2.0,), lambda x: x), (wide, (), lambda x: x)),
    ],
    ids=["static", "kind of static", "bool", "sign of zero", "shape", "dtype", "strides equal", "strides", "function"],
)
def test_what_differs_is_another_body(first: Any, second: Any, request: pytest.FixtureRequest) -> None:
    def step(p: Tree, x: torch.Tensor) -> list[torch.Tensor]:
        return [block("layer", fn, statics, view(x)) for fn, statics, view in (first, second)]

    stage = traced(step)
    same = request.node.callspec.id == "strides equal"
    assert calls(stage.graph) == ["layer", "layer" if same else "layer_2"]
    for got, want in zip(stage.graph(X), step({}, X), strict=True):
        assert torch.equal(got, want)


def test_one_operand_twice_or_two_are_one_body() -> None:
    """A body does not depend on how the caller computed its operands."""

    def step(p: Tree, x: torch.Tensor) -> list[torch.Tensor]:
        one, _ = block("pair", pair, (), x, {"a": x})
        two, rest = block("pair", pair, (), x, {"a": one})
        return [one, two, *rest["b"][1]]

    stage = traced(step)
    assert calls(stage.graph) == ["pair", "pair"]
    for got, want in zip(stage.graph(X), step({}, X), strict=True):
        assert torch.equal(got, want)


def test_bodies_are_called_by_tuple_and_unpacked() -> None:
    """Guarantees to every reader of a graph: flat operands, a tuple of results, and a value at every node.

    An operand that is a result goes around the call: who donates it to a later call need not see that it is the same.
    """

    def step(p: Tree, x: torch.Tensor) -> Tree:
        return block("pair", pair, (), x, {"a": x + 1})[1]

    stage = traced(step)
    (call,) = (n for n in stage.graph.graph.nodes if n.op == "call_module")
    body = bodies(stage.graph)["pair"]
    results = body.graph.output_node().args[0]
    assert isinstance(results, tuple)
    assert [tuple(v.shape) for v in call.meta["val"]] == [(4, 6), (4, 6), (6,)]
    assert [tuple(n.meta["val"].shape) for n in results] == [(4, 6), (4, 6), (6,)]
    assert stage.graph.graph.output_node().args[0][-1].op == "placeholder"
    assert len(call.args) == sum(n.op == "placeholder" for n in body.graph.nodes) == 2
    assert all("val" in n.meta for part in (stage.graph, body) for n in part.graph.nodes if n.op != "output")
    stage.graph.graph.lint()
    check(stage.graph, stage.signature, "trace")


def outer(x: torch.Tensor) -> torch.Tensor:
    return block("inner", scaled, (3.0,), x) + block("inner", scaled, (3.0,), x + 1)


def test_a_block_in_a_body_is_a_part_of_it() -> None:
    def step(p: Tree, x: torch.Tensor) -> torch.Tensor:
        return block("inner", scaled, (3.0,), block("outer", outer, (), block("outer", outer, (), x)))

    stage = traced(step)
    assert calls(stage.graph) == ["outer", "outer", "inner"]
    assert [calls(body) for body in bodies(stage.graph).values()] == [[], []]
    assert torch.equal(stage.graph(X)[0], step({}, X))


@pytest.mark.parametrize("name", ["half", "train", "graph", "forward", "training", "_modules"])
def test_a_body_may_be_called_as_modules_attributes_are(name: str) -> None:
    def step(p: Tree, x: torch.Tensor) -> torch.Tensor:
        return block(name, scaled, (2.0,), block(name, scaled, (2.0,), x))

    stage = traced(step)
    assert calls(stage.graph) == [f"{name}_2"] * 2
    assert torch.equal(stage.graph(X)[0], step({}, X))


# --- nothing from outside ---


@dataclass(frozen=True)
class Holder:
    factor: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def closure(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


@pytest.mark.parametrize("fn", [closure(2), Holder(2), Holder(2).method, functools.partial(scaled, 2)], ids=lambda f: type(f).__name__)
def test_a_function_that_carries_values_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(GraphError, match=r"block 'layer': .* carries values of its own; legal is a function that takes them"):
        traced(lambda p, x: block("layer", fn, (), x))


LENT: dict[str, torch.Tensor] = {}


def reads_lent(x: torch.Tensor) -> torch.Tensor:
    return x + LENT["value"]


def test_a_value_of_the_program_read_past_the_operands_is_refused() -> None:
    """A tensor that is computed in the graph and read through a global would become a constant of the trace."""

    def step(p: Tree, x: torch.Tensor) -> torch.Tensor:
        LENT["value"] = x * 3
        return block("layer", reads_lent, (), x)

    with pytest.raises(GraphError, match=r"a tensor \(4, 6\) of torch.float32 on meta is neither an operand nor computed from one"):
        traced(step)


def no_tensor(x: torch.Tensor) -> Tree:
    return x, 3


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda p, x: block("layer", scaled, (), 2.0, x), "operands are tensors, one is 2.0; other values are statics"),
        (lambda p, x: block("layer", scaled, (2.0,), None), "operands are tensors, one is None; other values are statics"),
        (lambda p, x: block("layer", no_tensor, (), x), "a block's results are tensors, one is 3"),
    ],
)
def test_only_tensors_go_in_and_come_out(step: Step, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        traced(step)


# --- over several devices ---

RULES = Rules.of({"ffn": "tp"})
W = Aval((6, 8), F32, (None, "ffn"))


def layouts(x: torch.Tensor, w: torch.Tensor) -> Tree:
    """Results of every layout: replicated, sharded, partial, and the operand itself."""
    hidden = x @ w
    return {"whole": x * 2, "split": hidden, "sum": ops.linear(hidden, w), "given": w}


def sharded(step: Step, mesh: str = "tp=2") -> PartitionedProgram:
    return partition(program(step, w=W), Mesh.parse(mesh), RULES)


def test_results_keep_their_layouts() -> None:
    met: list[dict[str, tuple[Placement, ...]]] = []

    def step(p: Tree, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            out = block("layer", layouts, (), x, p["w"])
            met.append({name: value.placements for name, value in out.items() if isinstance(value, DTensor)})
            x = constrain(out["sum"], None, None) + out["whole"]
        return x

    stage = sharded(step)
    assert met == [{"whole": (Replicate(),), "split": (Shard(1),), "sum": (Partial(),), "given": (Shard(1),)}] * 2
    assert calls(stage.graph) == ["layer"] * 2
    w = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    met.clear()
    want = step({"w": w}, X)
    for graph in (stage.graph, optimise(stage).graph):
        for (got,) in Interpreter(graph, stage.mesh)([[w.chunk(2, 1)[r], X, torch.tensor([0, r], dtype=torch.int32)] for r in range(2)]):
            torch.testing.assert_close(got, want)


def settled(x: torch.Tensor) -> torch.Tensor:
    return constrain(x, None, None) * 1.0


def test_an_addend_is_no_whole_value() -> None:
    """On each rank they have the same shape, and one body would reduce both or neither."""

    def step(p: Tree, x: torch.Tensor) -> list[torch.Tensor]:
        part = ops.linear(x @ p["w"], p["w"])
        return [block("layer", settled, (), x), block("layer", settled, (), part)]

    stage = sharded(step)
    assert calls(stage.graph) == ["layer", "layer_2"]
    assert [kind for kind, *_ in stage.collectives] == ["all_reduce"]
    w = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    want = step({"w": w}, X)
    for got in Interpreter(stage.graph, stage.mesh)([[w.chunk(2, 1)[r], X, torch.tensor([0, r], dtype=torch.int32)] for r in range(2)]):
        torch.testing.assert_close(got, want)


def mine(w: torch.Tensor) -> torch.Tensor:
    return constrain(shard_map(_numbered, [(w, (None, "ffn"))], Sum("ffn")), None)


def _numbered(w: torch.Tensor) -> torch.Tensor:
    return w.sum() * (axis_index("ffn") + 1)


def test_a_body_reads_the_position_as_an_operand() -> None:
    """The graph is traced as rank 0; in bodies too a rank's coordinates come from `inputs.coords`."""

    def step(p: Tree, x: torch.Tensor) -> torch.Tensor:
        return block("layer", mine, (), p["w"]) + block("layer", mine, (), p["w"])

    stage = sharded(step)
    check(stage.graph, stage.signature, "partition")
    coords = [n for n in stage.graph.graph.nodes if n.op == "placeholder"][-1]
    assert coords.meta["leaf"] == "inputs.coords"
    assert all(coords in n.args for n in stage.graph.graph.nodes if n.op == "call_module")
    w = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for (got,) in Interpreter(stage.graph, stage.mesh)([[w.chunk(2, 1)[r], X, torch.tensor([0, r], dtype=torch.int32)] for r in range(2)]):
        torch.testing.assert_close(got, 2 * (w[:, :4].sum() + 2 * w[:, 4:].sum())[None])
