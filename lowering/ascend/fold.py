"""Values that a graph derives from parameters alone: they are computed once, when weights are loaded.

Each is identified by its expression over names of parameters. Buckets whose expressions are equal can share one tensor, and a large
weight that several buckets read in another layout is then held once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ...graphs.errors import LoweringError
from ...graphs.invariants import results_of
from ...graphs.types import Leaf
from ..artifact import graph_io
from .convert import shape_of
from .ge_file import Folded

FOLDED = "folded"
"""Name of the body, in a lowered graph, that computes derived values from parameters."""


class FoldedFile(Protocol):
    """A file with derived values."""

    @property
    def folded(self) -> Folded | None:
        """Computes them."""
        ...


def expressions(ge_file: FoldedFile, params: Sequence[Leaf]) -> tuple[str, ...]:
    """The expression of each derived value, as in `aten.add.Tensor(params.norm, 1.0)`.

    Values with equal expressions are equal, in whichever graphs of an artifact they are: on one rank a parameter has one value.

    Args:
        params: parameters of the program, `Signature.params`.
    """
    if ge_file.folded is None:
        return ()
    graph = _decoded(ge_file.folded.graph)
    names = dict(zip(_placeholders(graph), (params[operand].name for operand in ge_file.folded.params), strict=True))
    return tuple(expression(node, names) for node in results_of(graph))


def sources(ge_file: FoldedFile) -> tuple[tuple[int, ...], ...]:
    """The operands that each derived value is computed from, in increasing order."""
    if ge_file.folded is None:
        return ()
    graph = _decoded(ge_file.folded.graph)
    operands = dict(zip(_placeholders(graph), ge_file.folded.params, strict=True))
    return tuple(tuple(sorted(operands[node] for node in _needed([value]) & operands.keys())) for value in results_of(graph))


def evaluate(ge_file: FoldedFile, operands: Sequence[torch.Tensor | None], which: Collection[int] | None = None) -> list[torch.Tensor]:
    """Computes derived values of one rank on the CPU.

    Args:
        operands: the parameters, or all operands, of the rank; None where no value asked for is computed from one (`sources`).
        which: numbers of the values; None: all.

    Returns:
        the values in increasing order of their numbers, contiguous; one that rearranges nothing shares its parameter's memory.

    Raises:
        LoweringError: a parameter is missing or has another shape or dtype than the graph was made for.
    """
    if ge_file.folded is None:
        return []
    graph, values = _decoded(ge_file.folded.graph), dict[Node, Any]()
    wanted = [node for i, node in enumerate(results_of(graph)) if which is None or i in which]
    needed = _needed(wanted)
    values.update(_params(graph, ge_file.folded, operands, needed))
    with torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "call_function" and node in needed:
                values[node] = node.target(*map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__))
    return [values[node] for node in wanted]


def expression(node: Node, names: Mapping[Node, str]) -> str:
    """A value as text: nested calls of operators, with names for the nodes that have one."""
    if node in names:
        return names[node]

    def text(argument: Any) -> str:
        if isinstance(argument, Node):
            return expression(argument, names)
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(text, argument))}]"
        return repr(argument)

    named = [f"{key}={text(value)}" for key, value in sorted(node.kwargs.items()) if not isinstance(value, torch.device)]
    return f"{graph_io.target_name(node.target).removesuffix('.default')}({', '.join([*map(text, node.args), *named])})"


@functools.lru_cache(maxsize=4)
def _decoded(graph: bytes) -> GraphModule:
    return graph_io.decode(graph)


def _placeholders(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _needed(values: Sequence[Node]) -> set[Node]:
    """The nodes that values are computed from, themselves included."""
    needed, queue = set(values), list(values)
    while queue:
        new = [source for source in queue.pop().all_input_nodes if source not in needed]
        needed.update(new)
        queue += new
    return needed


def _params(
    graph: GraphModule, folded: Folded, operands: Sequence[torch.Tensor | None], needed: Collection[Node]
) -> dict[Node, torch.Tensor]:
    params: dict[Node, torch.Tensor] = {}
    for node, operand in zip(_placeholders(graph), folded.params, strict=True):
        if node not in needed:
            continue
        tensor = operands[operand] if operand < len(operands) else None
        actual = "missing" if tensor is None else shape_of(tensor)
        if tensor is None or actual != shape_of(node.meta["val"]):
            raise LoweringError(f"{node.meta['leaf']} is {actual}; derived values are computed from {shape_of(node.meta['val'])}")
        params[node] = tensor
    return params
