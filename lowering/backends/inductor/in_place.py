"""An inductor pass that lets a graph write a pool several times in place.

Inductor itself writes a pool in place when a graph replaces it once. Where a chain of `index_put` replaces it several times, each the
result of the one before, inductor copies the whole pool at the first link and again at the end.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ....graphs.ir.alias import is_view, owner

COPY, PUT, PUT_IN_PLACE = torch.ops.aten.copy_.default, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default
DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
"""Digest of this file; part of an executable's key, because the pass runs after the text of the lowered graph is taken."""

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def write_in_place(graph: Graph) -> None:
    """Rewrites every chain whose links may all write in place; others stay as they are.

    A link may write in place when every reader of the value that it replaces, or of a view of it, comes before the link.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for copy in [node for node in graph.nodes if node.target is COPY and node.args[0].op == "placeholder"]:
        pool, chain = copy.args[0], _chain(copy)
        if len(chain) > 1 and all(_free(put, order, copy) for put in chain):
            _rewrite(graph, pool, chain, copy)


def _chain(copy: Node) -> list[Node]:
    """The `index_put` nodes from the pool to the value that `copy` stores in it, first to last; none where another node is between."""
    pool, value = copy.args[0], copy.args[1]
    chain: list[Node] = []
    while (source := _whole(value)) is not pool:
        if source.target is not PUT:
            return []
        chain.insert(0, source)
        value = source.args[0]
    return chain


def _whole(value: object) -> Node:
    """The node whose elements a value has, all and in the same order, possibly in another shape."""
    assert isinstance(value, Node)
    return _whole(value.args[0]) if value.target in RESHAPES else value


def _free(put: Node, order: dict[Node, int], copy: Node) -> bool:
    """Whether the memory that `put` replaces has no later reader but `copy`, and no other operand of `put` lies in it."""
    memory, operands = _whole(put.args[0]), list[Node]()
    map_arg(put.args[1:], operands.append)
    return memory not in map(owner, operands) and all(user is put or user is copy or order[user] < order[put] for user in _readers(memory))


def _readers(value: Node) -> Iterator[Node]:
    for user in value.users:
        if is_view(user.target) or user.target is operator.getitem:
            yield from _readers(user)
        else:
            yield user


def _rewrite(graph: Graph, pool: Node, chain: Sequence[Node], copy: Node) -> None:
    for put in chain:
        shape = put.meta["val"].shape
        with graph.inserting_before(put):
            view = graph.call_function(torch.ops.aten.view.default, (pool, list(shape)))
            view.meta["val"] = pool.meta["val"].view(shape)
            write = graph.call_function(PUT_IN_PLACE, (view, *put.args[1:]), put.kwargs)
            write.meta.update(put.meta)
        put.replace_all_uses_with(write)
        graph.erase_node(put)
    graph.erase_node(copy)
