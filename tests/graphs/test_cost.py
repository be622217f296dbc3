"""graphs/cost.py: costs and memory of graphs that are small enough to count by hand."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from npucompile.graphs import cost, ops
from npucompile.graphs.primitive import Cost
from npucompile.graphs.types import Aval, Leaf, Signature

aten = torch.ops.aten
F32 = torch.float32


def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Build:
    """A graph and its signature, built node by node."""

    def __init__(self) -> None:
        self.graph = Graph()

    def operand(self, *shape: int, dtype: torch.dtype = F32) -> Node:
        return self._add(self.graph.placeholder(f"x{len(self.graph.nodes)}"), meta(*shape, dtype=dtype))

    def call(self, target: Any, *args: Any, val: Any) -> Node:
        return self._add(self.graph.call_function(target, args), val)

    def _add(self, node: Node, val: Any) -> Node:
        node.meta["val"] = val
        return node

    def end(self, *results: Node) -> GraphModule:
        self.graph.output(results)
        return GraphModule(torch.nn.Module(), self.graph)


def leaves(kind: str, *nodes: Node) -> tuple[Leaf, ...]:
    return tuple(Leaf(f"{kind}.{i}", Aval(tuple(n.meta["val"].shape), n.meta["val"].dtype)) for i, n in enumerate(nodes))


# --- cost ---


def test_a_matrix_product_is_torch_s_formula() -> None:
    b = Build()
    y = b.call(aten.mm.default, b.operand(3, 5), b.operand(5, 7), val=meta(3, 7))
    assert cost.node_cost(y) == Cost(2 * 3 * 5 * 7, 4 * (15 + 35), 4 * 21)


def test_other_operators_cost_one_operation_an_element() -> None:
    b = Build()
    x = b.operand(3, 5)
    assert cost.node_cost(b.call(aten.add.Tensor, x, 1.0, val=meta(3, 5))) == Cost(15, 60, 60)
    assert cost.node_cost(b.call(aten.cat.default, [x, x], val=meta(6, 5))) == Cost(30, 120, 120)
    top = b.call(aten.topk.default, x, 2, val=(meta(3, 2), meta(3, 2, dtype=torch.int64)))
    assert cost.node_cost(top) == Cost(12, 60, 6 * 4 + 6 * 8)


VIEWS = [aten.view.default, aten._unsafe_view.default, aten.t.default, aten.unsqueeze.default, aten.detach.default]


@pytest.mark.parametrize("target", VIEWS, ids=str)
def test_views_and_unpacking_are_free(target: Any) -> None:
    b = Build()
    x = b.operand(3, 5)
    assert cost.node_cost(b.call(target, x, val=meta(15))) == Cost()
    halves = b.call(aten.split.Tensor, x, 2, val=(meta(2, 5), meta(1, 5)))
    assert cost.node_cost(halves) == Cost()
    assert cost.node_cost(b.call(operator.getitem, halves, 0, val=meta(2, 5))) == Cost()


def test_operations_on_cached_tokens_are_those_of_full_page_tables() -> None:
    def attention(pages: int) -> GraphModule:
        b = Build()
        q, k, v = b.operand(2, 8, 4, 16), b.operand(9, 32, 2, 16), b.operand(9, 32, 2, 16)
        table = b.operand(2, pages, dtype=torch.int32)
        lengths = b.operand(2, dtype=torch.int32), b.operand(2, dtype=torch.int32)
        return b.end(
            b.call(aten.add.Tensor, b.call(ops.paged_attention.op, q, k, v, table, *lengths, 0.25, val=q.meta["val"]), 1, val=meta(3))
        )

    # Products of queries with keys, and of weights with values.
    assert [cost.cached_flops(attention(pages)) for pages in (0, 1, 5)] == [2 * 2 * (2 * 8 * 4 * 16) * 32 * pages for pages in (0, 1, 5)]
    assert cost.cost(attention(5)).flops - cost.cached_flops(attention(5)) == cost.cost(attention(0)).flops


# --- memory; all sizes in KiB of f32 ---


def kib(n: int) -> torch.Tensor:
    return meta(n, 256)


def peak(b: Build, *outputs: Node) -> int:
    placeholders = tuple(n for n in b.graph.nodes if n.op == "placeholder")
    signature = Signature((), (), leaves("inputs", *placeholders), leaves("outputs", *outputs))
    return cost.memory(b.end(*outputs), signature).peak_bytes // 1024


def test_a_view_keeps_alive_what_it_views() -> None:
    b = Build()
    x = b.operand(1, 256)
    a = b.call(aten.add.Tensor, x, x, val=kib(4))
    rows = b.call(aten.split.Tensor, a, 1, val=[kib(1)] * 4)
    row = b.call(operator.getitem, rows, 0, val=kib(1))
    flat = b.call(aten.view.default, row, [-1], val=kib(1))
    c = b.call(aten.add.Tensor, x, x, val=kib(3))
    d = b.call(aten.mul.Tensor, flat, c, val=kib(1))
    assert peak(b, d) == 8, "4 lives through its view until 1 is made beside 3"


def test_a_wait_is_what_it_waits_for() -> None:
    b = Build()
    x = b.operand(1, 256)
    reduced = b.call(torch.ops._c10d_functional.all_reduce.default, x, "sum", "0", val=kib(4))
    waited = b.call(torch.ops._c10d_functional.wait_tensor.default, reduced, val=kib(4))
    assert cost.node_cost(waited) == Cost()
    assert peak(b, b.call(aten.add.Tensor, waited, 1, val=kib(1))) == 5


def test_donated_pools_are_counted_once() -> None:
    b = Build()
    weight, k, v, x, slots = b.operand(2, 256), *(b.operand(9, 4, 1, 256) for _ in range(2)), b.operand(3, 1, 256), b.operand(3)
    both = b.call(ops.cache_write.op, k, v, x, x, slots, val=(meta(9, 4, 1, 256), meta(9, 4, 1, 256)))
    new_k, new_v = (b.call(operator.getitem, both, i, val=meta(9, 4, 1, 256)) for i in range(2))
    y = b.call(aten.add.Tensor, x, weight, val=meta(3, 256))
    moved = b.call(aten.add.Tensor, new_v, 1, val=meta(9, 4, 1, 256))
    signature = Signature(leaves("params", weight), leaves("state", k, v), leaves("inputs", x, slots), leaves("outputs", y))
    memory = cost.memory(b.end(y, new_k, moved), signature)
    bytes_of = {"params_bytes": 2048, "state_bytes": 2 * 36 * 1024, "inputs_bytes": 3 * 1024 + 12, "peak_bytes": 3 * 1024}
    assert memory.as_dict() == bytes_of
    assert memory.total_bytes == 2048 + 72 * 1024 + 3 * 1024 + 12 + 3 * 1024


@pytest.mark.parametrize(("in_flight", "peak_kib"), [(1, 1 + 2 + 8 + 1), (2, 8 + 1 + 2 + 8 + 1)])
def test_rows_that_travel_live_until_a_kernel_waits_for_them(in_flight: int, peak_kib: int) -> None:
    """Two parts: experts give 8 for a dispatch's 2, a combine gives 1. With both on their way experts compute one beside the other's 8."""
    b = Build()
    x, ids, rank = b.operand(1, 256), b.operand(1, 1, dtype=torch.int32), b.operand(1, dtype=torch.int32)
    sent, outs, last = list[Node](), list[Node](), x
    for number in range(1 + in_flight):
        if number < 2:
            several = b.call(ops.moe_dispatch.op, x, ids, last, rank, 4, "world", 4, False, val=[kib(1), kib(1)])
            sent.append(last := b.call(operator.getitem, several, 0, val=kib(1)))
        if number >= in_flight - 1:
            rows = sent[len(outs)]
            made = b.call(aten.add.Tensor, rows, 1, val=kib(8))
            earlier = made if last is rows else last
            args = (made, ids, x, rows, ids, x, rank, 4, "world", 4, earlier, False)
            outs.append(last := b.call(ops.moe_combine.op, *args, val=kib(1)))
    assert peak(b, b.call(aten.add.Tensor, *outs, val=kib(1))) == peak_kib


# --- bodies ---


def body(inside: int) -> tuple[GraphModule, list[torch.Tensor]]:
    """(x, 3 KiB) -> (1 KiB, 3 KiB): before the results there is a value of `inside` KiB."""
    b = Build()
    x, pool = b.operand(1, 256), b.operand(3, 256)
    wide = b.call(aten.add.Tensor, x, x, val=kib(inside))
    results = [b.call(aten.add.Tensor, wide, wide, val=kib(1)), b.call(aten.add.Tensor, pool, 1, val=kib(3))]
    return b.end(*results), [kib(1), kib(3)]


def calls(times: int, inside: int = 7) -> tuple[GraphModule, Signature]:
    """`times` calls, each with a pool of its own."""
    b = Build()
    x, *pools = b.operand(1, 256), *(b.operand(3, 256) for _ in range(times))
    layer, vals = body(inside)
    stored, value = [], x
    for pool in pools:
        call = b._add(b.graph.call_module("layer", (value, pool)), tuple(vals))
        value = b.call(operator.getitem, call, 0, val=kib(1))
        stored.append(b.call(operator.getitem, call, 1, val=kib(3)))
    b.graph.output((value, *stored))
    root = torch.nn.Module()
    root.layer = layer
    signature = Signature((), leaves("state", *pools), leaves("inputs", x), leaves("outputs", value))
    return GraphModule(root, b.graph), signature


def test_a_body_costs_at_every_call() -> None:
    single, three = cost.cost(calls(1)[0]), cost.cost(calls(3)[0])
    assert single == cost.cost(body(7)[0])
    assert three == single + single + single


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_call_needs_what_its_body_needs_and_keeps_its_results(times: int) -> None:
    """7 and 1 within; from the second call on there is also the 1 it is given, and no earlier call's: pools keep nothing alive."""
    graph, signature = calls(times)
    memory = cost.memory(graph, signature)
    assert memory.state_bytes == times * 3 * 1024
    assert memory.peak_bytes == (8 if times == 1 else 9) * 1024


def test_results_of_a_call_that_replace_no_pool_are_kept() -> None:
    graph, donated = calls(1, inside=2)
    undonated = Signature((), (), (*donated.inputs, *donated.state), (*donated.outputs, *donated.state))
    assert cost.memory(graph, donated).peak_bytes == 3 * 1024, "2 and 1 within"
    assert cost.memory(graph, undonated).peak_bytes == 4 * 1024, "1 and 3"


def test_what_is_made_beside_a_pool_ends_with_its_reader() -> None:
    b = Build()
    x, pool = b.operand(1, 256), b.operand(3, 256)
    both = b.call(ops.add_rms_norm.op, x, x, x, 1e-6, 1.0, val=(kib(2), kib(3)))
    y, new = (b.call(operator.getitem, both, i, val=kib(2 + i)) for i in range(2))
    z = b.call(aten.add.Tensor, y, 1, val=kib(1))
    end = b.call(aten.add.Tensor, z, 1, val=kib(4))
    signature = Signature((), leaves("state", pool), leaves("inputs", x), leaves("outputs", end))
    assert cost.memory(b.end(end, new), signature).peak_bytes == 6 * 1024, "2 and its 3, which an operator allocates; 2 and 1; 1 and 4"
