"""Turns pools that a graph replaces several times over into pools that it writes several times in place, inside inductor.

Inductor writes in place what replaces an operand once. Of a chain, each replacing the result of the one before, it copies the whole
operand at the first link and again at the end.
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
"""Of this file: what it does to a graph shows in no text of one."""

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def write_in_place(graph: Graph) -> None:
    """Rewrites every chain whose links may write in place; others stay as they are.

    A link may when all that reads what it replaces, by whatever view, comes before it.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for copy in [node for node in graph.nodes if node.target is COPY and node.args[0].op == "placeholder"]:
        pool, chain = copy.args[0], _chain(copy)
        if len(chain) > 1 and all(_free(put, order, copy) for put in chain):
            _rewrite(graph, pool, chain, copy)


def _chain(copy: Node) -> list[Node]:
    """The replacements that made what is copied home, first to last; none where it is made of something else."""
    pool, value = copy.args[0], copy.args[1]
    chain: list[Node] = []
    while (source := _whole(value)) is not pool:
        if source.target is not PUT:
            return []
        chain.insert(0, source)
        value = source.args[0]
    return chain


def _whole(value: object) -> Node:
    """What a value holds all of, in the same order, if in another shape."""
    assert isinstance(value, Node)
    return _whole(value.args[0]) if value.target in RESHAPES else value


def _free(put: Node, order: dict[Node, int], copy: Node) -> bool:
    """Whether nothing reads the memory that `put` replaces after it, nor `put` itself, but what comes after the chain's end."""
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
            in_place = graph.call_function(PUT_IN_PLACE, (view, *put.args[1:]), put.kwargs)
            in_place.meta.update(put.meta)
        put.replace_all_uses_with(in_place)
        graph.erase_node(put)
    graph.erase_node(copy)
