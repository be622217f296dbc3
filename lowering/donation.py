"""Which operands of a graph's bodies may be donated: state pools that a body can update in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from ..graphs.errors import LoweringError
from ..graphs.invariants import results_of
from ..graphs.ir.alias import owner
from ..graphs.primitive import of_target
from ..graphs.types import Signature

Donated = dict[int, int]
"""Operand of a body that is a state pool -> the body's result that is the pool's new value."""


@dataclass(frozen=True)
class Donations:
    """The state pools of a graph that are updated in place.

    Attributes:
        bodies: donated operands by body; they are the same in all calls of a body.
        pools: node with an old or new value of a pool -> the pool's placeholder, whose memory holds the value.
    """

    bodies: Mapping[str, Donated]
    pools: Mapping[Node, Node]


@dataclass(frozen=True)
class _Write:
    """A call that replaces a pool's value.

    Attributes:
        operand: position of the pool among the call's operands.
        result: position of the new value among its results.
        old: node with the value that the call takes.
    """

    call: Node
    operand: int
    result: int
    old: Node


def donations(graph: GraphModule, signature: Signature) -> Donations:
    """Finds the calls that write each pool, and proves that writing in place changes no value that another call reads.

    Args:
        graph: operands, calls, unpackings and an output (graphs/ir/outline.py), functional.

    Raises:
        LoweringError: a pool's last value is not computed by a call from the pool; a call writes a pool before everyone has read the
            old value; the pool is a result of the program; or calls of one body have pools at different operands.
    """
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"][len(signature.params) :][: len(signature.state)]
    results = results_of(graph)
    outputs, new_state = results[: len(signature.outputs)], results[len(signature.outputs) :]
    by_call: dict[Node, Donated] = {node: {} for node in graph.graph.nodes if node.op == "call_module"}
    pools: dict[Node, Node] = {}
    for pool, new, leaf in zip(placeholders, new_state, signature.state, strict=True):
        writes = _writes(graph, leaf.name, pool, new)
        values = {node for value in (*(write.old for write in writes), new) for node in _same_value(value)}
        for write in writes:
            _check_last(leaf.name, write)
            _check_views(leaf.name, graph, write)
            by_call[write.call][write.operand] = write.result
        if writes and (returned := [node for node in outputs if node in values]):
            raise LoweringError(f"{leaf.name} is written in place, and {', '.join(map(str, returned))} would be a result in its memory")
        pools |= dict.fromkeys(values, pool)
    return Donations(_by_body(by_call), pools)


def _writes(graph: GraphModule, name: str, pool: Node, new: Node) -> list[_Write]:
    """The calls that turn `pool` into `new`, first to last; none where it stays as it is."""
    writes: list[_Write] = []
    while new is not pool:
        call = new.args[0] if new.target is operator.getitem else None
        if not isinstance(call, Node):
            raise LoweringError(
                f"{name} ends as {new}, which no call computes; legal is the pool itself, or a result of a call that takes it"
            )
        result = int(str(new.args[1]))
        operand = _donated_to(graph.get_submodule(str(call.target)), result)  # type: ignore[arg-type]
        # A result that no donating operator computes replaces the pool as the program got it.
        old = pool if operand is None else call.args[operand]
        if not isinstance(old, Node) or sum(list(call.args).count(node) for node in _same_value(old)) != 1:
            raise LoweringError(
                f"{name} ends as a result of {call}, which takes {', '.join(map(str, call.args))}; legal is a call that takes the pool, or "
                "its value from an earlier call, once"
            )
        writes.insert(0, _Write(call, list(call.args).index(old), result, old))
        new = old
    return writes


def _donated_to(body: GraphModule, result: int) -> int | None:
    """The operand of a body that an operator donates to one of the body's results, or None."""
    value = results_of(body)[result]
    writer, index = (value.args[0], value.args[1]) if value.target is operator.getitem else (value, 0)
    primitive = of_target(writer.target) if isinstance(writer, Node) else None
    if primitive is None or not isinstance(writer, Node):
        return None
    old = next((writer.args[operand] for operand, output in primitive.donates if output == index), None)
    operands = [node for node in body.graph.nodes if node.op == "placeholder"]
    return operands.index(old) if old in operands else None


def _same_value(value: Node) -> list[Node]:
    """The nodes that hold a value: one result of a call may be unpacked more than once."""
    if value.target is not operator.getitem:
        return [value]
    return [user for user in value.args[0].users if user.target is operator.getitem and user.args[1] == value.args[1]]  # type: ignore[union-attr]


def _check_last(name: str, write: _Write) -> None:
    """Refuses a write that may run before another call has read the value that it replaces.

    Legal are readers from whose results the writing call is computed: they come first both in the order of nodes and by data. A reader
    that also consumes the pool's new value depends on the write, so it cannot precede it.
    """
    readers = [user for node in _same_value(write.old) for user in node.users if user.op == "call_module" and user is not write.call]
    if any(write.call not in _dependants(reader) for reader in readers):
        calls = ", ".join(dict.fromkeys(map(str, [*readers, write.call])))
        raise LoweringError(
            f"{name} is read by {calls} and overwritten by {write.call}; legal are one call that writes it, and readers of the old value "
            "on whose results that call depends: the pool is updated in place, and only data decides which call runs first"
        )


def _check_views(name: str, graph: GraphModule, write: _Write) -> None:
    """Refuses a call that returns a view of the value to be replaced: readers of the view would see the new value."""
    for call, value in ((user, node) for node in _same_value(write.old) for user in node.users if user.op == "call_module"):
        body: GraphModule = graph.get_submodule(str(call.target))  # type: ignore[assignment]
        operand = [node for node in body.graph.nodes if node.op == "placeholder"][call.args.index(value)]
        if any(owner(result) is operand for result in results_of(body)):
            raise LoweringError(f"{call} returns a view of {name}, which {write.call} writes in place; legal are values of their own")


def _dependants(node: Node) -> set[Node]:
    """All nodes that are computed from one."""
    dependants, queue = set[Node](), [node]
    while queue:
        new = [user for user in queue.pop().users if user not in dependants]
        dependants.update(new)
        queue += new
    return dependants


def _by_body(by_call: Mapping[Node, Donated]) -> dict[str, Donated]:
    by_body: dict[str, Donated] = {}
    for call, donated in by_call.items():
        if by_body.setdefault(str(call.target), donated) != donated:
            raise LoweringError(
                f"body {call.target} is called with pools at operands {donated} and at {by_body[str(call.target)]}; legal is one place"
            )
    return by_body
