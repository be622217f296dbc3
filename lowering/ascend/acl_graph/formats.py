"""Which operands of a graph of torch operators are stored in the tiled format NZ.

Products take weights in NZ while they are captured as the documentation of Ascend/op-plugin says, and `internal_format_opapi` in its
op_plugin_functions.yaml. Packed int4 are too: both grouped products get them so in vllm-ascend (182b75e,
vllm_ascend/quantization/methods/w4a8.py), where the fused experts take no other format (weightNz in aclnn_dispatch_ffn_combine_w4_a8.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from ..operators.table import FORMS
from .file import AclFile, graph_of

TRANSPOSED = "aten.t.default"
"""A view, which a product takes in place of the weight."""
_TILE_BYTES, _TILE_ROWS = 32, 16


def weight_operands(acl_file: AclFile, *, needed: bool = False) -> tuple[int, ...]:
    """Operands and derived values worth storing in NZ: all readers take them as the weight of a product, and no tile needs padding.

    Args:
        needed: those alone that a product takes in NZ alone.
    """
    nodes = [node for node in graph_of(acl_file).graph.nodes if node.op == "placeholder"]
    return tuple(
        i
        for i, node in enumerate(nodes)
        if node.users and fills_tiles(val := node.meta["val"]) and all(map(_weight_of(node), node.users))
        if not needed or any(only_nz(reader, node, val) for reader in node.users)
    )


def only_nz(reader: Node, weight: Node, val: torch.Tensor) -> bool:
    """Whether an operator takes a node of that dtype as a weight, and in NZ alone."""
    form = FORMS.get(str(reader.target))
    return form is not None and form.only_nz == val.dtype and weight in weights_of(reader)


def in_nz(acl_file: AclFile) -> frozenset[Node]:
    """Nodes of `graph_of` whose values are in NZ: the operands of `weight_operands`, and their transposed views."""
    nodes = [node for node in graph_of(acl_file).graph.nodes if node.op == "placeholder"]
    weights = [nodes[operand] for operand in weight_operands(acl_file)]
    return frozenset([*weights, *(reader for weight in weights for reader in weight.users if str(reader.target) == TRANSPOSED)])


def _weight_of(weight: Node) -> Any:
    def takes(reader: Node) -> bool:
        if str(reader.target) == TRANSPOSED:
            return all(map(_weight_of(reader), reader.users))
        return weight in _as_weight(reader) and list(_nodes([*reader.args, *reader.kwargs.values()])).count(weight) == 1

    return takes


def weights_of(node: Node) -> list[Node]:
    """The nodes that an operator takes as weights."""
    return list(_as_weight(node))


def _as_weight(node: Node) -> Iterator[Node]:
    # int4 beside floats are read in ND alone (the columns of bf16 by i4 in operators/legality/experts.json).
    form = FORMS.get(str(node.target))
    if form is not None and not node.kwargs.get("antiquant_scale"):
        for position, name in form.weights:
            yield from _nodes([node.args[position] if len(node.args) > position else node.kwargs.get(name)])


def _nodes(values: Any) -> Iterator[Node]:
    for value in values:
        if isinstance(value, Node):
            yield value
        elif isinstance(value, list | tuple):
            yield from _nodes(value)


def fills_tiles(value: torch.Tensor) -> bool:
    """Whether a tensor divides into tiles of 16 rows of 32 bytes of one- or two-byte values, or of int32 that hold eight int4."""
    size = value.dtype.itemsize
    legal = size <= 2 or value.dtype == torch.int32
    return value.dim() > 1 and legal and value.shape[-2] % _TILE_ROWS == 0 and value.shape[-1] % (_TILE_BYTES // size) == 0
