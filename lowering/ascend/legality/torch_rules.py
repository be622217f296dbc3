"""Rules of whole graphs of torch operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

SUMS, COUNTS = "running sums", "one count each"


class _Written(NamedTuple):
    """Result that lists the tokens of each expert, the argument that says how, and its default."""

    result: int
    argument: str
    default: int


_WRITERS: Mapping[str, _Written] = {
    "npu.npu_moe_distribute_dispatch_v2.default": _Written(3, "expert_token_nums_type", 1),
    "npu.npu_moe_init_routing_v2.default": _Written(2, "expert_tokens_num_type", 0),
}


class _Read(NamedTuple):
    """The list among the arguments of an operator: its name and position (-1 for none), and the argument that says how it is read."""

    name: str
    position: int
    argument: str
    default: int


_READERS: Mapping[str, _Read] = {
    "npu.npu_grouped_matmul.default": _Read("group_list", -1, "group_list_type", 0),
    "npu.npu_grouped_matmul_swiglu_quant_v2.default": _Read("group_list", 4, "group_list_type", 0),
    "npu.npu_dequant_swiglu_quant.default": _Read("group_index", -1, "", 1),
}
_SAME = ("aten._to_copy.default", "aten.view.default", "aten.clone.default")


def group_list_kind(graph: GraphModule) -> Iterator[tuple[Node, str]]:
    """A list of tokens of each expert is read as its producer writes it; casts and reshapes between them change nothing.

    Both operators have 0 for running sums and 1 for one count each (Ascend/op-plugin@517f2e7 docs/zh/custom_APIs/torch_npu).

    Yields:
        each operator that reads a list of the other kind, and what is legal.
    """
    for node in graph.graph.nodes:
        if (read := _READERS.get(str(node.target))) is None:
            continue
        value = node.args[read.position] if 0 <= read.position < len(node.args) else node.kwargs.get(read.name)
        if not isinstance(value, Node) or (writer := _writer(value)) is None:
            continue
        written = _WRITERS[str(writer.target)]
        kinds = _kind(writer.kwargs.get(written.argument, written.default)), _kind(node.kwargs.get(read.argument, read.default))
        if kinds[0] != kinds[1]:
            yield node, f"{read.name} is read as {kinds[1]} and {writer.target} writes {kinds[0]}; legal is the same on both sides"


def _writer(value: Node) -> Node | None:
    while str(value.target) in _SAME:
        value = value.args[0]  # type: ignore[assignment]
    if str(value.target) != "operator.getitem" or not isinstance(value.args[0], Node):
        return None
    written = _WRITERS.get(str(value.args[0].target))
    return value.args[0] if written is not None and value.args[1] == written.result else None


def _kind(number: Any) -> str:
    return COUNTS if number == 1 else SUMS
