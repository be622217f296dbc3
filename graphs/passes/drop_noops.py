"""No-ops: removes aliases, views to the same shape and casts to the same type."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .base import Pass

_aten = torch.ops.aten
ALWAYS = {_aten.alias.default, _aten.detach.default, _aten.lift_fresh_copy.default}
SHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.expand.default}


def _does_nothing(node: Node) -> bool:
    if node.target in ALWAYS:
        return True
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or "val" not in source.meta or "val" not in node.meta:
        return False
    old, new = source.meta["val"], node.meta["val"]
    if node.target in SHAPES:
        return bool(old.shape == new.shape)
    if node.target is _aten._to_copy.default:
        return bool(old.dtype == new.dtype and set(node.kwargs) <= {"dtype"})
    return False


def run(graph: GraphModule) -> None:
    """Replaces each no-op by its operand."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and _does_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


PASS = Pass("drop_noops", run)
