"""Turns a graph of calls into where each body has state pools, having proved that every call may write its own in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from ...graphs.errors import LoweringError
from ...graphs.invariants import results_of
from ...graphs.ir.alias import owner
from ...graphs.primitive import of_target
from ...graphs.types import Signature

Pools = dict[int, int]
"""Operand of a body that is a state pool -> the body's result that is its new value."""


@dataclass(frozen=True)
class Placed:
    """Where the pools of a graph are.

    Attributes:
        bodies: for each body its pools: the same in all calls of it.
        homes: values of pools, old and new -> the operand in whose memory they are.
    """

    bodies: Mapping[str, Pools]
    homes: Mapping[Node, Node]


@dataclass(frozen=True)
class _Write:
    """A call that makes one value of a pool of another."""

    call: Node
    operand: int
    result: int
    old: Node


def place(graph: GraphModule, signature: Signature) -> Placed:
    """Finds for each pool the calls that make it anew, one of what the other made.

    Args:
        graph: operands, calls, unpackings and an output (graphs/ir/outline.py), functional.

    Raises:
        LoweringError: a pool ends as what no call makes of it; a call that writes it is not the last that has to do with the old
            value; the pool is a result of the program; or calls of one body have pools in different places.
    """
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"][len(signature.params) :][: len(signature.state)]
    results = results_of(graph)
    outputs, stored = results[: len(signature.outputs)], results[len(signature.outputs) :]
    found: dict[Node, Pools] = {node: {} for node in graph.graph.nodes if node.op == "call_module"}
    homes: dict[Node, Node] = {}
    for pool, new, leaf in zip(placeholders, stored, signature.state, strict=True):
        writes = _writes(graph, leaf.name, pool, new)
        values = {one for value in (*(write.old for write in writes), new) for one in _alike(value)}
        for write in writes:
            _check_last(leaf.name, write)
            _check_views(leaf.name, graph, write)
            found[write.call][write.operand] = write.result
        if writes and (told := [node for node in outputs if node in values]):
            raise LoweringError(f"{leaf.name} is written in place, and {', '.join(map(str, told))} would be a result in its memory")
        homes |= dict.fromkeys(values, pool)
    return Placed(_by_body(found), homes)


def _writes(graph: GraphModule, name: str, pool: Node, new: Node) -> list[_Write]:
    """The calls that turn `pool` into `new`, first to last; none where it stays as it is."""
    found: list[_Write] = []
    while new is not pool:
        call = new.args[0] if new.target is operator.getitem else None
        if not isinstance(call, Node):
            raise LoweringError(f"{name} ends as {new}, which no call makes of it; legal is the pool itself, or what calls make of it")
        result = int(str(new.args[1]))
        given = _replaced(graph.get_submodule(str(call.target)), result)  # type: ignore[arg-type]
        # What is computed by no operator that donates is made of the pool as the program gets it.
        old = pool if given is None else call.args[given]
        if not isinstance(old, Node) or sum(list(call.args).count(one) for one in _alike(old)) != 1:
            raise LoweringError(
                f"{name} ends as a result of {call}, which takes {', '.join(map(str, call.args))}; legal is a call that takes the pool, or "
                "what an earlier call made of it, once"
            )
        found.insert(0, _Write(call, list(call.args).index(old), result, old))
        new = old
    return found


def _replaced(body: GraphModule, result: int) -> int | None:
    """Operand of a body that an operator makes one of its results of, in the operand's own memory; None where none does."""
    value = results_of(body)[result]
    writer = value.args[0] if value.target is operator.getitem else None
    primitive = of_target(writer.target) if isinstance(writer, Node) else None
    if primitive is None or not isinstance(writer, Node):
        return None
    old = next((writer.args[donated] for donated, made in primitive.donates if made == value.args[1]), None)
    operands = [node for node in body.graph.nodes if node.op == "placeholder"]
    return operands.index(old) if old in operands else None


def _alike(value: Node) -> list[Node]:
    """The nodes with a value: the same result of a call may be unpacked more than once."""
    if value.target is not operator.getitem:
        return [value]
    return [user for user in value.args[0].users if user.target is operator.getitem and user.args[1] == value.args[1]]  # type: ignore[union-attr]


def _check_last(name: str, write: _Write) -> None:
    """Refuses a write that could come before another reader of what it replaces.

    A reader is done when the writing call has what it gave: then both the order of nodes and the order by data have it before. One
    that also takes a later value is never done in time.
    """
    readers = [user for one in _alike(write.old) for user in one.users if user.op == "call_module" and user is not write.call]
    if any(write.call not in _after(reader) for reader in readers):
        shown = ", ".join(dict.fromkeys(map(str, [*readers, write.call])))
        raise LoweringError(
            f"{name} is read by {shown} and made anew by {write.call}; legal are one call that writes it, and readers of the old value "
            "whose results that call is computed from: a device updates a pool in place, and nothing else says who sees which value"
        )


def _check_views(name: str, graph: GraphModule, write: _Write) -> None:
    """Refuses a call that gives away a view of what is replaced: whoever reads it would see the new value in it."""
    for call, value in ((user, one) for one in _alike(write.old) for user in one.users if user.op == "call_module"):
        body: GraphModule = graph.get_submodule(str(call.target))  # type: ignore[assignment]
        operand = [node for node in body.graph.nodes if node.op == "placeholder"][call.args.index(value)]
        if any(owner(result) is operand for result in results_of(body)):
            raise LoweringError(f"{call} returns a view of {name}, which {write.call} writes in place; legal are values of their own")


def _after(node: Node) -> set[Node]:
    """All nodes that are computed from one."""
    seen, queue = set[Node](), [node]
    while queue:
        new = [user for user in queue.pop().users if user not in seen]
        seen.update(new)
        queue += new
    return seen


def _by_body(found: Mapping[Node, Pools]) -> dict[str, Pools]:
    by_body: dict[str, Pools] = {}
    for call, pools in found.items():
        if by_body.setdefault(str(call.target), pools) != pools:
            raise LoweringError(
                f"body {call.target} is called with pools at operands {pools} and at {by_body[str(call.target)]}; legal is one place"
            )
    return by_body
