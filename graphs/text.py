"""Stable text of a graph: the same program gives the same lines, whatever names FX chose."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from .ir.flatten import bodies
from .types import DTYPE_NAMES, Aval


def as_text(graph: GraphModule, title: str) -> str:
    """One line a node: `%7 = npuc.linear(%5, %2) : bf16[4,64]`; operands carry their leaf names.

    The bodies that the graph calls follow, each once.

    Args:
        graph: a traced, partitioned or lowered graph.
        title: first line.
    """
    parts = [_lines(graph, title), *(_lines(body, f"body {name}") for name, body in bodies(graph).items())]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _lines(graph: GraphModule, title: str) -> list[str]:
    numbers: dict[Node, str] = {}
    lines = [title]
    for node in graph.graph.nodes:
        if node.op == "output":
            lines.append(f"  return {_argument(node.args[0], numbers)}")
            continue
        numbers[node] = f"%{len(numbers)}"
        if node.op == "placeholder":
            lines.append(f"  {numbers[node]} = operand {node.meta.get('leaf', node.name)} : {_type(node)}")
            continue
        arguments = [_argument(a, numbers) for a in node.args]
        arguments += [f"{k}={_argument(v, numbers)}" for k, v in sorted(node.kwargs.items())]
        target = f"call {node.target}" if node.op == "call_module" else target_name(node.target)
        lines.append(f"  {numbers[node]} = {target}({', '.join(arguments)}) : {_type(node)}")
    return lines


def target_name(target: Any) -> str:
    """`aten.add.Tensor` for an operator, `npuc.linear` for a default overload, the function's name otherwise."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def _type(node: Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return ", ".join(str(Aval(tuple(v.shape), v.dtype)) if isinstance(v, torch.Tensor) else "-" for v in values)


def _argument(value: Any, numbers: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v, numbers) for v in value)}]"
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    return repr(value) if not isinstance(value, str) else f"'{value}'"
