"""lowering/backends/inductor/layouts.py: a parameter is packed where all that read it can read it so, also through bodies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

from npucompile.graphs.ir.record import record
from npucompile.graphs.native_ops import NAMESPACE
from npucompile.graphs.ops.embed import Embed, embed_on_cpu
from npucompile.graphs.ops.linear import Linear, linear_on_cpu
from npucompile.graphs.ops.moe_experts import MoeExperts, moe_experts_on_cpu
from npucompile.lowering.backends.inductor.layouts import choose, layouts
from npucompile.lowering.backends.inductor.packing import KINDS, Layout

BF16 = torch.bfloat16


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = linear_on_cpu(Linear(x, weight))
    return out


def graph_of(function: Callable[..., list[torch.Tensor]], *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> GraphModule:
    like = [torch.empty(shape, dtype=torch.int64 if len(shape) == 1 else dtype, device="meta") for shape in shapes]
    return record(function, like, FakeTensorMode(), "cpu")


def chosen(graph: GraphModule) -> dict[int, Layout]:
    """What `choose` decides; the graph then reads just these operands by operators that want them packed."""
    choose(graph)
    graph.graph.lint()
    return layouts(graph)


def natives(graph: GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if str(node.target).startswith(NAMESPACE)]


def test_a_weight_of_a_product_is_packed_and_a_view_of_it_too() -> None:
    graph = graph_of(lambda x, w, wide: [product(product(x, w), wide.flatten(0, 1))], (5, 48), (70, 48), (2, 33, 70))
    assert chosen(graph) == {1: Layout("bf16", 1, 70, 48), 2: Layout("bf16", 1, 66, 70)}


def test_what_is_computed_from_a_weight_is_multiplied_as_it_is() -> None:
    graph = graph_of(lambda x, w: [product(x, w * 2)], (5, 48), (70, 48))
    assert chosen(graph) == {}
    assert natives(graph) == []


def test_a_weight_with_a_reader_of_plain_weights_stays_plain_for_all() -> None:
    graph = graph_of(lambda x, w: [product(x, w), w.sum(0)], (5, 48), (70, 48))
    assert chosen(graph) == {}
    assert natives(graph) == []


def test_two_products_that_want_other_panels_get_none() -> None:
    graph = graph_of(lambda x, y, w: [product(x, w), product(y, w.view(140, 24))], (5, 48), (5, 24), (70, 48))
    assert chosen(graph) == {}


def test_a_transposed_weight_stays_plain() -> None:
    graph = graph_of(lambda x, w: [product(x, w.t())], (5, 70), (70, 48))
    assert chosen(graph) == {}


def test_float16_stays_plain() -> None:
    graph = graph_of(lambda x, w: [product(x, w)], (5, 48), (70, 48), dtype=torch.float16)
    assert chosen(graph) == {}


def test_an_embedding_is_packed_only_for_a_head() -> None:
    def tied(tokens: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        return [product(embed_on_cpu(Embed(tokens, table)), table)]

    for kind in ("bf16", "f32"):
        assert chosen(graph_of(tied, (5,), (70, 48), dtype=KINDS[kind])) == {1: Layout(kind, 1, 70, 48)}
    alone = graph_of(lambda tokens, table: [embed_on_cpu(Embed(tokens, table))], (5,), (70, 48))
    assert chosen(alone) == {}
    assert natives(alone) == []


def mixture(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    share, ids = torch.zeros(5, 2, device=x.device), torch.zeros(5, 2, dtype=torch.int32, device=x.device)
    return moe_experts_on_cpu(MoeExperts(x, share, ids, gate_up, down))


GATE_UP, DOWN = Layout("bf16", 8, 20, 48), Layout("bf16", 4, 48, 20)


def test_both_weights_of_experts_are_packed_or_none() -> None:
    shapes = (5, 48), (4, 2, 20, 48), (4, 48, 20)
    assert chosen(graph_of(lambda x, up, down: [mixture(x, up, down)], *shapes)) == {1: GATE_UP, 2: DOWN}
    graph = graph_of(lambda x, up, down: [mixture(x, up, down), down.sum(0)], *shapes)
    assert chosen(graph) == {}
    assert natives(graph) == []


def test_what_stays_plain_in_one_operator_does_so_in_those_that_share_its_weights() -> None:
    def shared(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, other: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [mixture(product(x, w), up, down), mixture(x, up, other), down.sum(0)]

    graph = graph_of(shared, (5, 48), (4, 2, 20, 48), (4, 48, 20), (4, 48, 20), (48, 48))
    assert chosen(graph) == {4: Layout("bf16", 1, 48, 48)}
    assert len(natives(graph)) == 1


def calling(body: GraphModule, given: Callable[[Graph, list[torch.fx.Node]], list[list[torch.fx.Node]]]) -> GraphModule:
    """A graph over x [5, 48], w [70, 48] and v [70, 48] that calls a body once for each list of nodes that `given` returns."""
    graph, root = Graph(), torch.nn.Module()
    root.body = body
    operands = [graph.placeholder(name) for name in ("x", "w", "v")]
    for node, rows in zip(operands, (5, 70, 70), strict=True):
        node.meta["val"] = torch.empty(rows, 48, dtype=BF16, device="meta")
    graph.output(tuple(graph.call_module("body", tuple(nodes)) for nodes in given(graph, operands)))
    return GraphModule(root, graph)


def body() -> GraphModule:
    return graph_of(lambda x, w: [product(x, w)], (5, 48), (70, 48))


def test_parameters_that_calls_hand_to_a_body_are_packed() -> None:
    graph = calling(body(), lambda _, nodes: [[nodes[0], nodes[1]], [nodes[0], nodes[2]]])
    assert chosen(graph) == {1: Layout("bf16", 1, 70, 48), 2: Layout("bf16", 1, 70, 48)}
    assert len(natives(graph.body)) == 1


def test_a_body_that_is_handed_a_computed_weight_once_reads_plain_ones_in_every_call() -> None:
    def given(graph: Graph, nodes: list[torch.fx.Node]) -> list[list[torch.fx.Node]]:
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (nodes[2], 2))
        doubled.meta["val"] = nodes[2].meta["val"]
        return [[nodes[0], nodes[1]], [nodes[0], doubled]]

    graph = calling(body(), given)
    assert chosen(graph) == {}
    assert natives(graph.body) == []


def test_a_plain_reader_in_the_graph_keeps_a_body_from_packed_weights() -> None:
    def given(graph: Graph, nodes: list[torch.fx.Node]) -> list[list[torch.fx.Node]]:
        total = graph.call_function(torch.ops.aten.sum.dim_IntList, (nodes[2], [0]))
        total.meta["val"] = torch.empty(48, dtype=BF16, device="meta")
        return [[nodes[0], nodes[1]], [nodes[0], nodes[2]]]

    assert chosen(calling(body(), given)) == {}
