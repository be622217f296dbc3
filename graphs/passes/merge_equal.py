"""Common subexpressions: nodes that compute the same value become one node."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .base import Pass


def _pure(node: Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function"
    return not target._schema.is_mutable and target.namespace != "_c10d_functional"


def _key(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _key(v)) for k, v in value.items()))
    # 1, 1.0 and True are equal and hash alike; they are different arguments, and so are 0.0 and -0.0.
    return type(value), repr(value) if isinstance(value, float) else value


def run(graph: GraphModule) -> None:
    """Keeps the first of equal pure nodes.

    Collectives stay, since all ranks must run the same list of them; so do equal results, since each pool needs a value of its own.
    """
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    first_of: dict[Hashable, Node] = {}
    for node in list(graph.graph.nodes):
        if not _pure(node):
            continue
        key = (str(node.target), _key(node.args), _key(node.kwargs))
        first = first_of.setdefault(key, node)
        if first is not node and not (output in first.users and output in node.users):
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)


PASS = Pass("merge_equal", run)
