"""Rules that public reports of devices taught; `threads.json` has the reports, and rows of the table name the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..ge_operators import Operator
from ..operators.table import COMMUNICATING
from .node import Node, value_of

SUMS, COUNTS = 0, 1
"""Kinds of a list of tokens of each expert: running sums, or one count each."""


def no_mask_over_pages(node: Node, options: Mapping[str, str]) -> str | None:
    """A mask that is not the compressed causal one is ignored beyond 512 keys of a paged cache; lengths do the same."""
    mask = node.inputs.get("atten_mask")
    if mask is None or "block_table" not in node.inputs:
        return None
    mode = node.attributes.get("sparse_mode", 0)
    return f"sparse_mode is {mode}, with the mask {mask} over pages; legal are lengths without a mask, or modes 2, 3 and 4"


def mask_or_pages(node: Node, options: Mapping[str, str]) -> str | None:
    """Attention over packed tokens with neither averages all values."""
    if "atten_mask" in node.inputs or "block_table" in node.inputs:
        return None
    return f"has neither a mask nor pages in layout {node.attributes.get('input_layout')}; legal is a mask with sparse_mode 3, or pages"


def as_many_tensors(node: Node, options: Mapping[str, str], inputs: list[str], like: str) -> str | None:
    """Lists of tensors are as long as another list, or empty; a tensor without elements stands for an absent one."""
    wanted = _listed(node, like)
    for name in inputs:
        if (count := _listed(node, name)) not in (0, wanted):
            return f"has {count} tensors of {name} for {wanted} of {like}; legal are {wanted}, or none"
    return None


def one_number_an_expert(node: Node, options: Mapping[str, str], inputs: list[str], weights: str) -> str | None:
    """A list of tokens has a number for each expert: those of the first axis of one weight, or one for each of several weights."""
    count, first = _listed(node, weights), node.inputs.get(f"{weights}0")
    if first is None:
        return None
    experts = first.shape[0] if count == 1 and len(first.shape) > 2 else count
    for name in inputs:
        if name in node.inputs and node.inputs[name].shape[0] != experts:
            return f"{name} is {node.inputs[name]} for {experts} experts; legal is one number for each"
    return None


def no_empty_input(node: Node, options: Mapping[str, str]) -> str | None:
    """GE refuses these operators when an input has an unknown or empty dimension."""
    for name, tensor in node.inputs.items():
        if any(size <= 0 for size in tensor.shape):
            return f"{name} is {tensor}; legal are dimensions above zero"
    return None


def transposed_product(node: Node, options: Mapping[str, str], below: int) -> str | None:
    """Sizes of a batched product that transposes its first factor: the batch and the summed size, and with the batch second also what
    they are multiplied."""
    shape, order = node.inputs["x1"].shape, tuple(node.attributes.get("perm_x1", (0, 1, 2)))
    batch, summed = shape[order[0]], shape[order[2]]
    if order[0] and batch * summed >= below:
        return f"x1 is {node.inputs['x1']} with the batch second: batch times summed size is {batch * summed}; legal is below {below}"
    if max(batch, summed) >= below:
        return f"x1 is {node.inputs['x1']}, a batch of {batch} and a summed size of {summed}; legal is below {below}"
    return None


GraphRule = Callable[[Sequence[Operator]], Iterator[tuple[Any, str]]]
"""rule(operators of a graph, in order): operators that break it, each with what was given and what is legal."""


def group_list_kind(ops: Sequence[Operator]) -> Iterator[tuple[Any, str]]:
    """A list of tokens of each expert is read as its producer writes it; casts and reshapes between them change nothing."""
    producers = {op.name: op for op in ops}
    for op in (op for op in ops if op.type in _READERS):
        for tensor, desc in zip(op.input, op.input_desc, strict=False):
            if desc.name != _READERS[op.type] or (source := _list_source(tensor, producers)) is None:
                continue
            wanted, listed = _kind_read(op), _kind_written(*source)
            if wanted != listed:
                yield op, f"{desc.name} is read as {wanted} and {source[0].type} writes {listed}; legal is the same on both sides"


def ordered_exchange(ops: Sequence[Operator]) -> Iterator[tuple[Any, str]]:
    """Data orders every collective against every dispatch and combine: on vector cores (AIV mode) two at once wait for each other."""
    exchanges = [op.name for op in ops if op.type in _EXCHANGES]
    if not exchanges:
        return
    ordered = _ordered(ops, {name: 1 << place for place, name in enumerate(exchanges)})
    for op in ops:
        if op.type in _SHARED and (unordered := ~ordered[op.name] & ((1 << len(exchanges)) - 1)):
            first = exchanges[(unordered & -unordered).bit_length() - 1]
            yield op, f"no data orders it against {first} and {unordered.bit_count() - 1} more; legal is a collective before or after each"


GRAPH_RULES: Mapping[str, GraphRule] = {rule.__name__: rule for rule in (group_list_kind, ordered_exchange)}
"""Rules of whole graphs by name."""

_EXCHANGES = frozenset(kind for kind, record in COMMUNICATING.items() if record.own_group)
_SHARED = COMMUNICATING.keys() - _EXCHANGES


def _ordered(ops: Sequence[Operator], bits: Mapping[str, int]) -> dict[str, int]:
    """Of each operator the marked ones that it depends on or that depend on it, as a sum of `bits`."""
    edges = [(op.name, op.producers) for op in ops]
    before: dict[str, int] = {}
    for name, producers in edges:
        reached = bits.get(name, 0)
        for producer in producers:
            reached |= before[producer]
        before[name] = reached
    after = {name: bits.get(name, 0) for name, _ in edges}
    for name, producers in reversed(edges):
        if reached := after[name]:
            for producer in producers:
                after[producer] |= reached
    return {name: before[name] | after[name] for name, _ in edges}


_LISTS: Mapping[tuple[str, str], tuple[str, int]] = {
    ("MoeDistributeDispatchV2", "3"): ("expert_token_nums_type", COUNTS),
    ("MoeInitRoutingV3", "2"): ("expert_tokens_num_type", SUMS),
}
"""Outputs that list tokens of each expert: the attribute that says how, and its default (hicann/ops-transformer@c29bc10, *_def.cpp)."""
_READERS = {"GroupedMatmul": "group_list", "GroupedMatmulSwigluQuantV2": "group_list", "DequantSwigluQuant": "group_index"}
_KINDS = {SUMS: "running sums", COUNTS: "counts"}
_SAME_LIST = ("Cast", "Identity", "Reshape")


def _list_source(tensor: str, producers: Mapping[str, Any]) -> tuple[Any, str] | None:
    """The operator, and the number of its output, that lists tokens of each expert; None where it is another one's."""
    name, _, port = tensor.rpartition(":")
    while name in producers and producers[name].type in _SAME_LIST:
        name, _, port = producers[name].input[0].rpartition(":")
    source = producers.get(name)
    return (source, port) if source is not None and (source.type, port) in _LISTS else None


def _kind_written(source: Any, port: str) -> str:
    attribute, default = _LISTS[source.type, port]
    return _kind(value_of(source.attr[attribute]) if attribute in source.attr else default)


def _kind_read(op: Any) -> str:
    if op.type == "DequantSwigluQuant":
        return _kind(COUNTS)
    return _kind(value_of(op.attr["group_list_type"]) if "group_list_type" in op.attr else SUMS)


def _kind(number: Any) -> str:
    return _KINDS.get(number, f"kind {number}")


def _listed(node: Node, name: str) -> int:
    """Length of a list of tensors (`weight0`, `weight1`, ...), without tensors that have no elements."""
    return sum(key.rstrip("0123456789") == name and key != name and tensor.elements > 0 for key, tensor in node.inputs.items())
