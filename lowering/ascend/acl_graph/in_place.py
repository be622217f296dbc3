"""Replaces functional operators on state pools, whose result is copied into the pool, by those that write the pool."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from ....graphs.ir.alias import owner
from ...artifact.graph_io import find_target
from ..operators.record import TorchForm
from ..operators.table import FORMS


def write_in_place(graph: GraphModule) -> None:
    """Replaces what can be replaced in a flat graph; other writes remain copies.

    A form replaces a functional operator where each of its new pools is copied into the operand that it was computed from, and nothing
    reads the operand's old value after the operator.
    """
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    for node in list(graph.graph.nodes):
        form = FORMS.get(str(node.target))
        if form is not None and form.in_place and (copies := _copies(node, form, order)):
            order[_replace(graph, node, form, copies)] = order[node]
    graph.graph.lint()
    graph.recompile()


def _copies(node: Node, form: TorchForm, order: Mapping[Node, int]) -> list[Node]:
    """The copies of an operator's new pools into the old ones; empty where the operator cannot write in place."""
    copies = []
    for result, position in form.pools.items():
        pool = node.args[position]
        new = [user for user in node.users if user.target is operator.getitem and user.args[1] == result]
        if not isinstance(pool, Node) or pool.op != "placeholder":
            return []
        copy = [
            user for value in new for user in value.users if user.target is torch.ops.aten.copy_.default and user.args[:2] == (pool, value)
        ]
        if len(copy) != 1 or _read_later(pool, order[node], copy[0], order):
            return []
        copies += copy
    return copies


def _read_later(pool: Node, after: int, copy: Node, order: Mapping[Node, int]) -> bool:
    """Whether something reads a pool's old value behind a position and before the copy."""
    readers = [pool]
    while readers:
        for user in readers.pop().users:
            if user is not copy and after < order[user] < order[copy]:
                return True
            if user is not copy and owner(user) is pool:
                readers.append(user)
    return False


def _replace(graph: GraphModule, node: Node, form: TorchForm, copies: list[Node]) -> Node:
    for copy in copies:
        graph.graph.erase_node(copy)
    with graph.graph.inserting_before(node):
        written = graph.graph.call_function(find_target(form.in_place), node.args, dict(node.kwargs))
    written.meta = dict(node.meta)
    others = [value for i, value in enumerate(node.meta["val"]) if i not in form.pools]
    written.meta["val"] = others[0] if form.one_result else tuple(others)
    for value in list(node.users):
        pool = form.pools.get(int(value.args[1]))  # type: ignore[arg-type]
        value.replace_all_uses_with(written if pool is None else node.args[pool])  # type: ignore[arg-type]
        graph.graph.erase_node(value)
    graph.graph.erase_node(node)
    return written
