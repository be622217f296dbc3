"""lowering/ascend/emulator/torch_program.py: one graph runs on all ranks of a mesh; bad graphs and meshes are refused."""

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from npucompile.graphs import ops as ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.primitive import TABLE, Primitive
from npucompile.graphs.types import Mesh
from npucompile.lowering.artifact.graph_io import NamedOperator
from npucompile.lowering.ascend.emulator.interpreter import Interpreter

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MESHES = ["", "tp=2", "tp=4", "dp=2", "dp=2,tp=2", "dp=4,tp=2", "dp=3,tp=5", "dp=2,tp=8", "tp=3,dp=2"]


def built(*names: str, fn: Callable[..., Any], **bodies: GraphModule) -> GraphModule:
    """A graph with placeholders of these names; fn(graph, *placeholders) adds the other nodes and returns the results."""
    graph, root = Graph(), torch.nn.Module()
    for name, body in bodies.items():
        setattr(root, name, body)
    results = fn(graph, *(graph.placeholder(name) for name in names))
    graph.output(tuple(results))
    return GraphModule(root, graph)


def run(graph: GraphModule, mesh: str, operands: Callable[[int], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    where = Mesh.parse(mesh)
    return Interpreter(graph, where)([operands(rank) for rank in range(where.size)])


def waited(g: Graph, op: Any, *args: Any) -> Node:
    return g.call_function(c10d.wait_tensor.default, (g.call_function(op, args),))


# --- groups ---


@pytest.mark.parametrize("mesh", MESHES)
def test_every_group_sums_its_own_ranks(mesh: str) -> None:
    def body(g: Graph, x: Node) -> list[Node]:
        return [waited(g, c10d.all_reduce.default, x, "sum", name) for name in ("tp", "dp", "world")]

    where = Mesh.parse(mesh)
    tp, size = where.axis("tp"), where.size
    out = run(built("x", fn=body), mesh, lambda rank: [torch.tensor([2.0**rank])])
    for rank in range(size):
        wanted = [
            sum(2.0**r for r in range(size) if r // tp == rank // tp),
            sum(2.0**r for r in range(size) if r % tp == rank % tp),
            2.0**size - 1,
        ]
        assert [x.item() for x in out[rank]] == wanted


def test_ranks_exchange_parts() -> None:
    def body(g: Graph, x: Node) -> list[Node]:
        return [waited(g, c10d.all_to_all_single.default, x, [1, 1], [1, 1], "dp"), waited(g, c10d.broadcast.default, x, 1, "tp")]

    out = run(built("x", fn=body), "dp=2,tp=2", lambda rank: [torch.tensor([10 * rank, 10 * rank + 1])])
    assert [x.tolist() for x, _ in out] == [[0, 20], [10, 30], [1, 21], [11, 31]]
    assert [x.tolist() for _, x in out] == [[10, 11], [10, 11], [30, 31], [30, 31]]


# --- what a graph may hold ---


def test_bodies_are_run_at_every_call() -> None:
    def layer(g: Graph, x: Node, w: Node) -> list[Node]:
        total = waited(g, c10d.all_reduce.default, x, "sum", "tp")
        return [g.call_function(aten.mul.Tensor, (total, w)), g.call_function(aten.neg.default, (x,))]

    inner = built("x", "w", fn=layer)

    def outer(g: Graph, x: Node, w: Node) -> list[Node]:
        result = g.call_module("inner", (x, w))
        return [g.call_function(operator.getitem, (result, i)) for i in (0, 1)]

    def main(g: Graph, x: Node, w: Node) -> list[Node]:
        first = g.call_module("outer", (x, w))
        second = g.call_module("outer", (g.call_function(operator.getitem, (first, 0)), w))
        return [g.call_function(operator.getitem, (second, 0)), g.call_function(operator.getitem, (second, 1)), x]

    graph = built("x", "w", fn=main, outer=built("x", "w", fn=outer, inner=inner))
    out = run(graph, "tp=2", lambda rank: [torch.tensor([rank + 1.0]), torch.tensor([10.0 * (rank + 1)])])
    assert [[x.item() for x in results] for results in out] == [[900.0, -30.0, 1.0], [1800.0, -60.0, 2.0]]


def test_tensors_are_made_on_the_cpu() -> None:
    def body(g: Graph, x: Node) -> list[Node]:
        created = g.call_function(aten.arange.default, (3,), {"device": torch.device("meta"), "pin_memory": False})
        return [created, g.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64, "device": torch.device("meta")})]

    ((created, moved),) = run(built("x", fn=body), "", lambda rank: [torch.ones(2)])
    assert created.tolist() == [0, 1, 2]
    assert (moved.device.type, moved.dtype) == ("cpu", torch.float64)


def test_updates_reach_the_ranks_own_operands() -> None:
    scatter = NamedOperator("npu.npu_scatter_nd_update_.default")

    def layer(g: Graph, pool: Node, other: Node, x: Node) -> list[Node]:
        g.call_function(scatter, (pool, g.call_function(aten.zeros.default, ([1, 1],), {"dtype": torch.int32}), x))
        g.call_function(aten.copy_.default, (other, g.call_function(aten.add.Tensor, (other, 1))))
        return [x]

    def body(g: Graph, pool: Node, other: Node, x: Node) -> list[Node]:
        return [g.call_function(operator.getitem, (g.call_module("layer", (pool, other, x)), 0))]

    pools = [(torch.zeros(2, 1), torch.zeros(2)) for _ in range(2)]
    graph = built("pool", "other", "x", fn=body, layer=built("pool", "other", "x", fn=layer))
    run(graph, "tp=2", lambda rank: [*pools[rank], torch.full((1, 1), rank + 5.0)])
    assert [pool.flatten().tolist() for pool, _ in pools] == [[5.0, 0.0], [6.0, 0.0]]
    assert [other.tolist() for _, other in pools] == [[1.0, 1.0]] * 2


def test_results_of_a_collective_are_not_shared() -> None:
    def body(g: Graph, x: Node) -> list[Node]:
        total = waited(g, c10d.all_gather_into_tensor.default, x, 2, "tp")
        g.call_function(aten.mul_.Tensor, (total, x))
        return [total]

    out = run(built("x", fn=body), "tp=2", lambda rank: [torch.tensor([rank + 2.0])])
    assert [x.tolist() for (x,) in out] == [[4.0, 6.0], [6.0, 9.0]]


# --- primitives that communicate ---


class Shout(NamedTuple):
    x: torch.Tensor
    more: int
    group: str


CALLS: list[list[Shout]] = []


@pytest.fixture(scope="module")
def shout() -> Iterator[Primitive[Shout]]:
    """A primitive whose result is the values of all ranks of the group, the rank's own first."""
    primitive = Primitive("lockstep_shout", Shout, factors="_ -> _")
    primitive.reference(lambda args: pytest.fail("it has a meaning only for a whole group"))

    @primitive.group_reference
    def of_group(calls: list[Shout]) -> list[torch.Tensor]:
        CALLS.append(calls)
        return [torch.cat([x + more, *(other for other, *_ in calls if other is not x)]) for x, more, _ in calls]

    yield primitive
    del TABLE["lockstep_shout"]


def test_primitives_with_a_rule_for_groups_are_called_once_a_group(shout: Primitive[Shout]) -> None:
    def body(g: Graph, x: Node) -> list[Node]:
        return [g.call_function(shout.op, (x, 100), {"group": "tp"}), g.call_function(shout.op, (x, 0, "dp"))]

    CALLS.clear()
    out = run(built("x", fn=body), "dp=2,tp=2", lambda rank: [torch.tensor([rank])])
    assert [(a.tolist(), b.tolist()) for a, b in out] == [
        ([100, 1], [0, 2]),
        ([101, 0], [1, 3]),
        ([102, 3], [2, 0]),
        ([103, 2], [3, 1]),
    ]
    assert [call[1:] for call in CALLS[0]] == [(100, "tp")] * 2
    assert len(CALLS) == 4


# --- refusals ---


def test_a_missing_kernel_is_named() -> None:
    graph = built("x", fn=lambda g, x: [g.call_function(NamedOperator("npu.npu_moonwalk.default"), (x,))])
    message = r"npu.npu_moonwalk.default has no CPU kernel; besides aten, npuc, npuc_order there are .*npu_rms_norm"
    with pytest.raises(LoweringError, match=message):
        run(graph, "", lambda rank: [torch.zeros(1)])


def test_operands_are_counted() -> None:
    graph = built("x", "y", fn=lambda g, x, y: [x])
    with pytest.raises(LoweringError, match="operands of 1 ranks, the mesh has 2"):
        Interpreter(graph, Mesh.parse("tp=2"))([[torch.zeros(1)]])
    with pytest.raises(LoweringError, match="rank 1 has 1 operands, the graph takes 2"):
        Interpreter(graph, Mesh.parse("tp=2"))([[torch.zeros(1)] * 2, [torch.zeros(1)]])


def test_only_operands_are_read() -> None:
    graph = built("x", fn=lambda g, x: [g.call_method("neg", (x,))])
    with pytest.raises(LoweringError, match="is a call_method of 'neg'; everything a graph reads must be an operand"):
        run(graph, "", lambda rank: [torch.zeros(1)])
