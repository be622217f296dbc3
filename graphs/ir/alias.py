"""Aliasing: which nodes of a graph share memory."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

# These return their operand, but their schemas do not declare it.
UNDECLARED = (torch.ops.aten._unsafe_view.default, torch.ops._c10d_functional.wait_tensor.default)


def owner(node: Node) -> Node:
    """The node that allocated a value, through any number of views and unpackings."""
    while node.op == "call_function" and (node.target is operator.getitem or shares(node.target)):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def shares(target: Any) -> bool:
    """Whether an operator's results share the memory of its first operand: a view, or an update in place."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target in UNDECLARED or any(result.alias_info is not None for result in target._schema.returns)


def is_view(target: Any) -> bool:
    """Whether an operator moves no data: it shares memory with its first operand and writes nothing."""
    return shares(target) and not target._schema.is_mutable
