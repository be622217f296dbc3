"""Proves of a lowered graph that no index which depends on floats can leave its table, whatever the floats are.

An index out of range is undefined on a device: a hang, or another request's memory.

Ranges of values are followed through the operators (ranges.py). An index that comes of what the host gives and of constants alone is not
looked at.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...graphs.errors import LoweringError
from ...graphs.ir.flatten import bodies
from .ranges import ANYTHING, GIVEN, Range, arguments_of, name_of, result, val_of


@dataclass(frozen=True)
class _Index:
    """An operand of an operator that names places of a table.

    Attributes:
        index: its name in the operator's schema.
        size: places that the table has, of the arguments by name.
        least: the smallest legal number; -1 where the operator takes it for "none".
    """

    index: str
    size: Callable[[Mapping[str, Any]], int]
    least: int = 0


def _along(table: str = "self") -> Callable[[Mapping[str, Any]], int]:
    return lambda a: int(val_of(a[table]).shape[a["dim"]])


def _rows(table: str, dims: int = 1) -> Callable[[Mapping[str, Any]], int]:
    return lambda a: math.prod(val_of(a[table]).shape[:dims])


INDICES: Mapping[str, _Index] = {
    **dict.fromkeys(("aten.gather", "aten.index_select", "aten.scatter", "aten.scatter_", "aten.scatter_add"), _Index("index", _along())),
    **dict.fromkeys(("aten.index_add", "aten.index_copy", "aten.index_fill", "aten.scatter_reduce"), _Index("index", _along())),
    "aten.embedding": _Index("indices", _rows("weight")),
    "npu.npu_scatter_nd_update": _Index("indices", lambda a: max(val_of(a["input"]).shape[: val_of(a["indices"]).shape[-1]])),
    "npu.npu_scatter_nd_update_": _Index("indices", lambda a: max(val_of(a["input"]).shape[: val_of(a["indices"]).shape[-1]])),
    "npu.npu_scatter_pa_kv_cache": _Index("slot_mapping", _rows("key_cache", 2)),
    "npu.npu_scatter_pa_kv_cache_functional": _Index("slot_mapping", _rows("key_cache", 2)),
    "npu.npu_recurrent_gated_delta_rule": _Index("ssm_state_indices", _rows("state")),
    "npu.npu_recurrent_gated_delta_rule_functional": _Index("ssm_state_indices", _rows("state")),
    "npu.npu_moe_init_routing_v2": _Index("expert_idx", lambda a: a["expert_num"]),
    "npu.npu_moe_distribute_dispatch_v2": _Index("expert_ids", lambda a: a["moe_expert_num"]),
    "npu.npu_moe_distribute_combine_v2": _Index("expert_ids", lambda a: a["moe_expert_num"]),
    "npu.npu_sparse_flash_attention": _Index(
        "sparse_indices", lambda a: val_of(a["block_table"]).shape[1] * val_of(a["key"]).shape[1], least=-1
    ),
    "npu.npu_moe_finalize_routing": _Index("expanded_src_to_dst_row", lambda a: math.prod(val_of(a["scales"]).shape), least=-1),
}
"""Operators that read or write places which an operand names. `aten.index` and `aten.index_put` take a list and are in `_listed`."""


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
    name = name_of(node)
    if name.removesuffix("_") in ("aten.index", "aten.index_put", "aten._unsafe_index"):
        table, indices = val_of(node.args[0]), node.args[1]
        found = [(f"index {i}", index, table.shape[i], 0) for i, index in enumerate(indices) if isinstance(index, Node)]  # type: ignore
    elif rule := INDICES.get(name):
        given = arguments_of(node)
        index = given[rule.index]
        found = [(rule.index, index, rule.size(given), rule.least)] if isinstance(index, Node) else []
    else:
        return
    for what, index, size, least in found:
        known = ranges[index]
        if not known.computed or val_of(index).dtype == torch.bool:
            continue
        if not known.bounded or (not known.given and not least <= known.low <= known.high < size):
            yield (
                f"{what}, {index.name}, depends on floats and is in {known.low} to {known.high}; legal is {least} to {size - 1} whatever "
                "the floats are: clamp it, or take it from argmax, topk or a sum of comparisons"
            )
