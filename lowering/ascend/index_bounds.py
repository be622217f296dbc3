"""Proves of a lowered graph that no index which depends on floats can leave its table, whatever the floats are.

An index out of range is undefined on a device: a hang, or another request's memory.

Ranges of values are followed through the operators (operators/value_rules.py, and `TorchForm.values` of records). An index
that comes of what the host gives and of constants alone is not looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...graphs.errors import LoweringError
from ...graphs.ir.flatten import bodies
from .operators.table import FORMS
from .operators.value_rules import ANYTHING, GIVEN, INDICES, RULES, Range, arguments_of, opname_of, val_of


def check(graph: GraphModule, where: str) -> None:
    """Refuses a lowered graph with an index that floats can drive out of its table.

    Args:
        graph: calls of lowered bodies, or operators alone.
        where: names the graph in the error.

    Raises:
        LoweringError: naming the body, the node, its index and what is legal.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if breaches := [*dict.fromkeys(_Bounds(graph).run([_leaf(node) for node in placeholders])[1])]:
        raise LoweringError(f"in {where}, " + "; ".join(breaches))


def _leaf(node: Node) -> Range:
    return ANYTHING if val_of(node).is_floating_point() else GIVEN


class _Bounds:
    """Ranges of the values of a graph; a body is run once for each set of ranges that it is called with."""

    def __init__(self, graph: GraphModule, name: str = "") -> None:
        self._graph, self._name = graph, f"{name}/" if name else ""
        self._bodies = {key: _Bounds(body, key) for key, body in bodies(graph).items()}
        self._known: dict[tuple[Range, ...], tuple[list[Range], list[str]]] = {}

    def run(self, operands: Sequence[Range]) -> tuple[list[Range], list[str]]:
        """Ranges of the results, and every index that may leave its table."""
        if (key := tuple(operands)) not in self._known:
            self._known[key] = self._run(iter(operands))
        return self._known[key]

    def _run(self, operands: Iterator[Range]) -> tuple[list[Range], list[str]]:
        ranges: dict[Node, Any] = {}
        breaches: list[str] = []
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                ranges[node] = next(operands)
            elif node.op == "call_module":
                ranges[node], found = self._bodies[str(node.target)].run([ranges[source] for source in node.args])
                breaches += found
            elif node.op == "output":
                return [ranges[result] for result in node.args[0]], breaches
            elif node.target is operator.getitem:
                ranges[node] = ranges[node.args[0]][node.args[1]]
            else:
                breaches += [f"{self._name}{node.name} ({node.target}): {found}" for found in _unbounded(node, ranges)]
                ranges[node] = result(node, ranges)
        raise AssertionError("a graph has an output")


def _unbounded(node: Node, ranges: Mapping[Node, Range]) -> Iterator[str]:
    """The indices of an operator that may leave its table."""
    form, name = FORMS.get(str(node.target)), opname_of(node)
    if name in ("index", "index_put", "_unsafe_index"):
        table, listed = val_of(node.args[0]), enumerate(node.args[1])  # type: ignore[arg-type]
        places = [(f"index {i}", index, table.shape[i], 0) for i, index in listed if isinstance(index, Node)]
    elif rule := (form.index if form is not None else None) or INDICES.get(name):
        given = arguments_of(node)
        places = [(rule.index, given[rule.index], rule.size(given), rule.least)] if isinstance(given[rule.index], Node) else []
    else:
        return
    for what, index, size, least in places:
        known = ranges[index]
        if not known.computed or val_of(index).dtype == torch.bool:
            continue
        if not known.bounded or (not known.given and not least <= known.low <= known.high < size):
            yield (
                f"{what}, {index.name}, depends on floats and is in {known.low} to {known.high}; legal is {least} to {size - 1} whatever "
                "the floats are: clamp it, or take it from argmax, topk or a sum of comparisons"
            )


def result(node: Node, ranges: Mapping[Node, Range]) -> Any:
    """Ranges of what an operator gives."""
    computed = any(isinstance(ranges[source], Range) and ranges[source].computed for source in node.all_input_nodes)
    form, vals = FORMS.get(str(node.target)), node.meta["val"]
    rule = (form.values if form is not None else None) or RULES.get(opname_of(node))
    known = rule(node, lambda argument: _read(argument, ranges)) if rule is not None else None
    if isinstance(vals, tuple | list):
        listed = known if isinstance(known, list) else [known] * len(vals)
        return [_checked(each, val, computed) for each, val in zip(listed, vals, strict=True)]
    return _checked(known, vals, computed)


def _checked(known: Range | None, val: torch.Tensor, computed: bool) -> Range:
    """The range, or what is known of a value of that dtype anyway."""
    if known is not None and (known.bounded or not val.is_floating_point()):
        return known
    if val.is_floating_point():
        return ANYTHING if known is None else replace(ANYTHING, columns=known.columns)
    if val.dtype == torch.bool:
        return Range(0, 1, computed)
    return Range(computed=True) if computed else GIVEN


def _read(argument: Any, ranges: Mapping[Node, Range]) -> Range:
    """The range of an operand, which may be a number."""
    if isinstance(argument, Node):
        return ranges[argument]
    return Range(float(argument), float(argument))
