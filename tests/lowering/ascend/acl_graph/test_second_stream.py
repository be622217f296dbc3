"""lowering/ascend/acl_graph/second_stream.py: whatever is on either stream, data are there and memory is nobody else's."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import acl_graphs as ag
from torch.fx import Graph, Node

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.acl_graph.file import AclFile, graph_of
from npucompile.lowering.ascend.acl_graph.second_stream import Order, check, on_host, order

PLACED = st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=24)
"""Of each operator how far back its sources are, whether it is on the second stream, and whether it is an unpacking (0)."""


def graph(drawn: Any) -> tuple[list[Node], set[Node]]:
    made = Graph()
    nodes, second = list[Node](), set[Node]()
    for i, (backs, beside, kind) in enumerate(drawn):
        sources = [nodes[i - back] for back in backs if back <= i]
        unpacks = not kind and sources
        nodes.append(made.call_function(operator.getitem, (sources[0], 0)) if unpacks else made.call_function(max, tuple(sources)))
        second.update([nodes[-1]] if beside else [])
    return nodes, second


def happens_before(nodes: list[Node], second: set[Node], ordered: Order) -> Mapping[Node, set[Node]]:
    """Of each launch those that have ended when it runs."""
    ended: dict[Node, set[Node]] = {}
    last = dict[bool, Node]()
    for node in (node for node in nodes if not on_host(node)):
        before = [source for source in (last.get(node in second), ordered.waits.get(node)) if source is not None]
        ended[node] = {*before, *(earlier for source in before for earlier in ended[source])}
        last[node in second] = node
    return ended


@given(PLACED)
@example([([], False, 1), ([1], True, 0), ([1], True, 1), ([], False, 1), ([], False, 1)])  # a view's memory is that of what it is of
def test_data_are_there_and_memory_is_free_when_it_is_given_again(drawn: Any) -> None:
    nodes, second = graph(drawn)
    last = {source: node for node in nodes for source in node.all_input_nodes}
    ordered = order(nodes, second, {node: last.get(node, node) for node in nodes})
    ended, launch = happens_before(nodes, second, ordered), dict[Node, Node]()
    readers: dict[Node, set[Node]] = {}
    for node in nodes:
        launch[node] = launch[node.all_input_nodes[0]] if on_host(node) else node
        for source in node.all_input_nodes if not on_host(node) else ():
            readers.setdefault(launch[source], set()).add(node)
            assert launch[source] in ended[node], "what it reads has been computed"
    # The allocator of each stream gives any memory that the host let go to who asks next.
    held, free = {node: [value for value in nodes if launch[value] is node] for node in ended}, {True: list[Node](), False: list[Node]()}
    freed = [value for values in ordered.frees.values() for value in values]
    assert sorted(freed, key=nodes.index) == nodes, "every value is let go once"
    for node in nodes:
        for owner in free[node in second] if node in ended else ():
            assert {owner, *readers.get(owner, ())} <= ended[node], "nobody else uses its memory any more"
        for value in ordered.frees.get(node, ()):
            assert nodes.index(last.get(value, value)) <= nodes.index(node)
            held[launch[value]].remove(value)
            if not held[launch[value]]:
                free[launch[value] in second].append(launch[value])


def body(pool: Any, x: Any, ids: Any) -> tuple[Any, ...]:
    pool.add_(x)
    rows, *_ = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, "dispatch", 4, 0, 8, quant_mode=0)
    shared = x.exp().sin()
    return (rows.sum() + shared, shared.cos())


def placed(name: str) -> AclFile:
    """The file with one operator on the second stream."""
    made, _ = ag.of_body(body, state_pool=((4, 32), ag.BF16), inputs_x=((4, 32), ag.BF16), inputs_ids=((4, 2), ag.I32))
    number = next(i for i, node in enumerate(graph_of(made).graph.nodes) if str(node.target) == name)
    return replace(made, beside=((number, number + 1),))


def test_what_needs_no_order_passes() -> None:
    check(replace(placed("aten.exp.default"), beside=()))
    check(placed("aten.exp.default"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("npu.npu_moe_distribute_dispatch_v2.default", r"is on the second stream; legal there is what neither communicates"),
        ("aten.add_.Tensor", r"add_.Tensor\) is on the second stream; .*nor reads or writes memory that is written in place"),
    ],
)
def test_what_streams_could_do_in_two_orders_is_refused(name: str, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        check(placed(name))
