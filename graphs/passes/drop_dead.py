"""Dead code: removes nodes that nothing reads; operands stay, they are the calling convention."""

from __future__ import annotations

from torch.fx import GraphModule

from .base import Pass


def run(graph: GraphModule) -> None:
    """Removes unread nodes without side effects, last first."""
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.graph.erase_node(node)


PASS = Pass("drop_dead", run)
