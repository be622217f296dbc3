"""Parts of bodies that can be computed outside of them: which nodes may move, and the body that takes their values as operands."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.node import map_arg

from ...graphs.invariants import results_of
from ...graphs.ir.record import record
from .ge_file import GE_DTYPES

# Memory that nobody has written: two of equal expression differ.
_UNDEFINED = ("empty", "new_empty")


def is_plain(node: Node) -> bool:
    """Whether a node computes the same values wherever and whenever it runs, and writes nothing."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._opname.startswith(_UNDEFINED)


def is_operand(value: object) -> bool:
    """Whether a body can take a value as an operand."""
    return isinstance(value, torch.Tensor) and value.dtype in GE_DTYPES


def taking(body: GraphModule, values: Sequence[Node], moved: Collection[Node]) -> tuple[GraphModule, list[int]]:
    """The body without nodes that are computed outside of it, and the positions of the operands that it still reads.

    Args:
        body: flat; operands, operators and results.
        values: the tensors among `moved` that other nodes or the result read; they become operands, behind those that are still read.
        moved: nodes that read operands, constants and each other alone.
    """
    operands = [node for node in body.graph.nodes if node.op == "placeholder"]
    kept = [i for i, node in enumerate(operands) if not node.users or any(user not in moved for user in node.users)]
    if len(kept) == len(operands) and not values:
        return body, kept
    read = [operands[i] for i in kept] + list(values)
    rest = _copied(body, read, moved)
    if all(node.meta["val"].is_contiguous() for node in read):
        return rest, kept
    return recorded(rest, [node.meta["val"] for node in read]), kept


def _copied(body: GraphModule, read: Sequence[Node], moved: Collection[Node]) -> GraphModule:
    """The body with some nodes as operands and without others, its nodes named as a recording of it would name them."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in read:
        copies[node] = graph.placeholder(f"arg{len(copies)}_1")
        copies[node].meta["val"] = node.meta["val"]
    unpacked = dict[Node, list[Node]]()
    for node in body.graph.nodes:
        if node.op in ("placeholder", "output") or node in moved:
            continue
        if node.target is operator.getitem:
            copies[node] = unpacked[node.args[0]][node.args[1]]
            continue
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.call_function(node.target, args, kwargs)
        copies[node].meta["val"] = value = node.meta["val"]
        if isinstance(value, tuple):
            unpacked[node] = [graph.call_function(operator.getitem, (copies[node], i)) for i in range(len(value))]
            for element, result in zip(unpacked[node], value, strict=True):
                element.meta["val"] = result
    graph.output(tuple(copies[node] for node in results_of(body)))
    graph.eliminate_dead_code()
    copy = _make_graph_module(torch.nn.Module(), graph)
    graph.owning_module = copy
    return copy


def recorded(body: GraphModule, operands: Sequence[torch.Tensor]) -> GraphModule:
    """The body recorded again over contiguous operands, because a value that is handed over is contiguous whatever its strides were."""
    like = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in operands]
    graph = record(Interpreter(body).run, like, FakeTensorMode())
    graph.recompile()
    return graph
