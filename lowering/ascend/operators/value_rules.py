"""Ranges of the values that operators give, from those of their operands, and the operands that name places of a table.

Floats that a step computes can be NaN, so that nothing is known of them, of a number that one was cast to, or of how often a comparison
holds but that it holds for as many elements as there are. What the host gives (inputs, integer pools) is legal by contract: only what is
added to it is bounded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class Range:
    """What is known of the elements of a tensor.

    Attributes:
        low, high: of its numbers; infinite where nothing is known, and for floats that may be NaN.
        computed: it depends on floats.
        given: the numbers are added to others, which the host gives.
        columns: ranges of its parts along the last dimension, with the size of each; empty where they are one.
    """

    low: float = -math.inf
    high: float = math.inf
    computed: bool = False
    given: bool = False
    columns: tuple[tuple[int, Range], ...] = ()

    @property
    def bounded(self) -> bool:
        """Whether both ends are finite, hence no element is NaN."""
        return math.isfinite(self.low) and math.isfinite(self.high)


GIVEN = Range(0, 0, given=True)
ANYTHING = Range(computed=True)


Read = Callable[[Any], Range]
"""The range of an operand."""
ValueRule = Callable[[Node, Read], Any]
"""Ranges of the results; None where nothing is known but what their dtypes say."""


@dataclass(frozen=True)
class Index:
    """An operand that names places of a table.

    Attributes:
        index: its name in the operator's schema.
        size: places that the table has, of the arguments by name.
        least: the smallest legal number; -1 where the operator takes it for "none".
    """

    index: str
    size: Callable[[Mapping[str, Any]], int]
    least: int = 0


def rows(table: str, dims: int | None = 1) -> Callable[[Mapping[str, Any]], int]:
    """The places of the first dimensions of an argument; of all where `dims` is None."""
    return lambda arguments: math.prod(val_of(arguments[table]).shape[:dims])


def val_of(node: Any) -> torch.Tensor:
    """The abstract value of a node with one result."""
    value: torch.Tensor = node.meta["val"]
    return value


def opname_of(node: Node) -> str:
    """Name of an operator without namespace, overload and the underscore of a form that writes in place."""
    target: Any = node.target
    name: str = target._opname
    return name.removesuffix("_")


def arguments_of(node: Node) -> dict[str, Any]:
    """Arguments by the names of the schema, with its defaults."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    values = {argument.name: argument.default_value for argument in declared}
    return values | dict(zip((argument.name for argument in declared), node.args, strict=False)) | dict(node.kwargs)


def passed(node: Node, read: Read) -> Any:
    """What moves elements of its first operand: parts of the last dimension keep their own ranges where it is whole."""
    name, source = opname_of(node), read(node.args[0])
    if name == "constant_pad_nd":
        return _union([source, Range(0, 0)])
    if name in ("split_with_sizes", "slice", "split") and source.columns:
        return _cut(node, name, source)
    val = node.meta["val"]
    before = val_of(node.args[0]).shape
    kept = isinstance(val, torch.Tensor) and val.dim() and len(before) and val.shape[-1] == before[-1]
    moved = name in ("transpose", "permute", "t", "flip", "roll", "as_strided", "select", "amax", "amin", "slice", "unbind")
    return source if kept and not moved else replace(source, columns=())


def _cut(node: Node, name: str, source: Range) -> Any:
    arguments, last = arguments_of(node), val_of(node.args[0]).dim() - 1
    if arguments["dim"] not in (-1, last):
        return source if name == "slice" else [source] * len(node.meta["val"])
    size = val_of(node.args[0]).shape[-1]
    if name == "slice":
        start, end = arguments["start"] or 0, min(arguments["end"] or size, size)
        return _part(source, start, end) if start >= 0 and end >= 0 else replace(source, columns=())
    sizes = arguments.get("split_sizes") or [val.shape[-1] for val in node.meta["val"]]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_part(source, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _part(source: Range, start: int, end: int) -> Range:
    """The union of the columns from `start` to `end`."""
    at, kept = 0, []
    for size, known in source.columns:
        if at < end and start < at + size:
            kept.append(known)
        at += size
    return _union(kept)


def _union(ranges: Sequence[Range]) -> Range:
    return Range(
        min((known.low for known in ranges), default=0),
        max((known.high for known in ranges), default=0),
        any(known.computed for known in ranges),
        any(known.given for known in ranges),
    )


def _arithmetic(of_ends: Callable[[float, float], float]) -> ValueRule:
    """Of two operands; the ends of the result are among those of the operands' ends."""

    def rule(node: Node, read: Read) -> Range:
        left, right = read(node.args[0]), read(node.args[1])
        if node.kwargs.get("alpha"):
            alpha = float(str(node.kwargs["alpha"]))
            right = replace(right, low=min(right.low * alpha, right.high * alpha), high=max(right.low * alpha, right.high * alpha))
        both = (left, right)
        ends = [0.0 if math.isnan(end := of_ends(a, b)) else end for a in (left.low, left.high) for b in (right.low, right.high)]
        known = all(source.bounded for source in both)
        return replace(_union(both), low=min(ends) if known else -math.inf, high=max(ends) if known else math.inf)

    return rule


def _clamp(node: Node, read: Read) -> Range:
    given = arguments_of(node)
    source, least, most = read(given["self"]), given.get("min"), given.get("max")
    low, high = (None if bound is None else read(bound) for bound in (least, most))
    if val_of(node).is_floating_point() and not source.bounded:
        return source
    if source.given and (low is None or high is None):
        return source
    bounds = [bound for bound in (low, high) if bound is not None]
    reached = Range(
        max(source.low, low.low) if low and not source.given else low.low if low else source.low,
        min(source.high, high.high) if high and not source.given else high.high if high else source.high,
        source.computed,
        any(bound.given for bound in bounds),
    )
    # Of a number beyond the other bound the bound itself is left.
    return replace(reached, low=min(reached.low, reached.high), high=max(reached.low, reached.high))


def _extreme(node: Node, read: Read) -> Range:
    """`minimum` and `maximum`: a bound on one operand bounds the result; of floats NaN passes."""
    left, right = read(node.args[0]), read(node.args[1])
    either = _union([left, right])
    if val_of(node).is_floating_point() and not either.bounded:
        return either
    if opname_of(node) == "minimum":
        high = min(left.high, right.high) if not either.given else either.high
        return replace(either, high=high)
    return replace(either, low=max(left.low, right.low) if not either.given else either.low)


def _summed(node: Node, read: Read) -> Range:
    source, terms = read(node.args[0]), val_of(node.args[0]).numel() // max(1, val_of(node).numel())
    return replace(source, low=source.low * terms, high=source.high * terms, columns=())


def _running_sum(node: Node, read: Read) -> Range:
    source, terms = read(node.args[0]), val_of(node.args[0]).shape[int(str(node.args[1]))]
    return replace(source, low=min(source.low, source.low * terms), high=max(source.high, source.high * terms), columns=())


def _place(node: Node, read: Read) -> Range:
    """`argmax`: a place, whatever is compared."""
    source, dim = val_of(node.args[0]), node.args[1] if len(node.args) > 1 else None
    size = source.numel() if dim is None else source.shape[int(str(dim))]
    return Range(0, size - 1, read(node.args[0]).computed)


def _ordered(node: Node, read: Read) -> list[Range]:
    """`topk`, `sort`, `max` and `min` of a dimension: values, and their places."""
    given, source = arguments_of(node), read(node.args[0])
    size = val_of(node.args[0]).shape[given.get("dim", -1)]
    return [replace(source, columns=()), Range(0, size - 1, source.computed)]


def _constant(node: Node, read: Read) -> Range:
    given = arguments_of(node)
    value = given.get("fill_value", given.get("s", {"ones": 1, "ones_like": 1, "new_ones": 1}.get(opname_of(node), 0)))
    return read(value)


def _counted(node: Node, read: Read) -> Range:
    """`arange`."""
    given = arguments_of(node)
    start, end, step = given.get("start") or 0, given["end"], given.get("step") or 1
    last = start + step * (val_of(node).numel() - 1) if val_of(node).numel() else start
    return Range(min(start, last), max(start, last)) if end != start else Range(start, start)


def _remainder(node: Node, read: Read) -> Range:
    source, divisor = read(node.args[0]), read(node.args[1])
    if divisor.given or not 0 < divisor.low < math.inf or val_of(node).is_floating_point():
        return _union([source, divisor])
    return Range(0, divisor.high - 1, source.computed)


def _divided(node: Node, read: Read) -> Range:
    source, divisor = read(node.args[0]), read(node.args[1])
    if divisor.given or divisor.low != divisor.high or not divisor.low > 0 or not source.bounded:
        return replace(_union([source, divisor]), low=-math.inf, high=math.inf)
    ends = math.floor(source.low / divisor.low), math.ceil(source.high / divisor.low)
    return replace(source, low=ends[0], high=ends[1], columns=())


def _chosen(node: Node, read: Read) -> Range:
    """`where`."""
    values = _union([read(node.args[1]), read(node.args[2])])
    return replace(values, computed=values.computed or read(node.args[0]).computed)


def _filled(node: Node, read: Read) -> Range:
    """`masked_fill`."""
    return replace(_union([read(node.args[0]), read(node.args[2])]), computed=read(node.args[0]).computed or read(node.args[1]).computed)


def _joined(node: Node, read: Read) -> Range:
    parts: Any = node.args[0]
    whole, dim = _union([read(part) for part in parts]), arguments_of(node).get("dim", 0)
    if opname_of(node) == "cat" and dim in (-1, val_of(node).dim() - 1):
        return replace(whole, columns=tuple((val_of(part).shape[-1], read(part)) for part in parts))
    return whole


def _cast(node: Node, read: Read) -> Range:
    """Integers of bounded floats are bounded; a cast of NaN is any number."""
    source = read(node.args[0])
    if not val_of(node.args[0]).is_floating_point() or val_of(node).is_floating_point() or source.bounded:
        return source
    columns = tuple((size, known if known.bounded else Range(computed=True)) for size, known in source.columns)
    return Range(computed=True, columns=columns)


def _looked_up(node: Node, read: Read) -> Range:
    """Elements of a table."""
    return replace(read(node.args[0]), columns=())


def _replaced(node: Node, read: Read) -> Range:
    """A table with elements of another tensor in some places."""
    given = arguments_of(node)
    value = next(given[name] for name in ("src", "value", "values", "source", "updates") if name in given)
    return _union([read(node.args[0]), read(value)])


def experts(node: Node, read: Read) -> list[Range | None]:
    """Gates: weights, ids of experts, and more. The kernels order the numbers of experts, whatever their scores are: assumed."""
    known = Range(0, val_of(node.args[0]).shape[-1] - 1, True)
    return [known if i == 1 else None for i in range(len(node.meta["val"]))]


def routed(node: Node, read: Read) -> list[Range | None]:
    """Routing: the row of each choice, -1 where it has none."""
    choices = val_of(arguments_of(node)["expert_idx"]).numel()
    return [None, Range(-1, choices - 1, True), Range(0, choices, True), None]


def keys_of_pages(arguments: Mapping[str, Any]) -> int:
    """Positions of keys that a page table has room for."""
    return int(val_of(arguments["block_table"]).shape[1] * val_of(arguments["key"]).shape[1])


def indexed_keys(node: Node, read: Read) -> list[Range | None]:
    """The lightning indexer: positions of keys, -1 behind them."""
    return [Range(-1, keys_of_pages(arguments_of(node)) - 1, True), None]


def rounded_indexed_keys(node: Node, read: Read) -> Range:
    """The same of keys of int8, whose scores are no result."""
    return Range(-1, keys_of_pages(arguments_of(node)) - 1, True)


_PASSED = """
    view _unsafe_view reshape expand permute transpose t unsqueeze squeeze slice select clone contiguous alias detach repeat flip
    split split_with_sizes unbind chunk as_strided narrow lift_fresh_copy wait_tensor all_gather_into_tensor all_to_all_single
    broadcast constant_pad_nd amax amin copy roll
"""
_COMPARED = """
    eq ne lt le gt ge logical_and logical_or logical_not logical_xor isfinite isnan isinf any all
"""
RULES: Mapping[str, ValueRule] = {
    **dict.fromkeys(_PASSED.split(), passed),
    **dict.fromkeys(_COMPARED.split(), lambda node, read: Range(0, 1, any(read(source).computed for source in node.all_input_nodes))),
    "add": _arithmetic(operator.add),
    "sub": _arithmetic(operator.sub),
    "rsub": _arithmetic(lambda a, b: b - a),
    "mul": _arithmetic(operator.mul),
    "neg": lambda node, read: replace(source := read(node.args[0]), low=-source.high, high=-source.low, columns=()),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    **dict.fromkeys(("minimum", "maximum"), _extreme),
    "sum": _summed,
    "cumsum": _running_sum,
    **dict.fromkeys(("argmax", "argmin"), _place),
    **dict.fromkeys(("topk", "sort", "max", "min"), _ordered),
    **dict.fromkeys(("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_ones", "new_full"), _constant),
    **dict.fromkeys(("scalar_tensor", "fill"), _constant),
    "arange": _counted,
    "remainder": _remainder,
    **dict.fromkeys(("floor_divide", "div"), _divided),
    "where": _chosen,
    "masked_fill": _filled,
    **dict.fromkeys(("cat", "stack"), _joined),
    "_to_copy": _cast,
    **dict.fromkeys(("gather", "index_select", "index", "embedding"), _looked_up),
    **dict.fromkeys(("scatter", "index_put", "index_add", "index_copy"), _replaced),
}
"""Rules of torch's own operators, by `opname_of`; those of NPU operators stand in their records."""


def _along(arguments: Mapping[str, Any]) -> int:
    return int(val_of(arguments["self"]).shape[arguments["dim"]])


INDICES: Mapping[str, Index] = {
    **dict.fromkeys(("gather", "index_select", "scatter", "scatter_add", "scatter_reduce"), Index("index", _along)),
    **dict.fromkeys(("index_add", "index_copy", "index_fill"), Index("index", _along)),
    "embedding": Index("indices", rows("weight")),
}
"""Operands of torch's own operators, by `opname_of`. `index` and `index_put` take a list of them."""
