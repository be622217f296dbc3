"""Unread results: removes from each body the results that none of its calls reads."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ..ir.flatten import bodies
from .base import Pass
from .drop_dead import run as drop_dead


def run(graph: GraphModule) -> None:
    """Removes unread results from each body and renumbers the `getitem` nodes of its calls."""
    drop_dead(graph)
    for name, body in bodies(graph).items():
        calls = [node for node in graph.graph.nodes if node.op == "call_module" and node.target == name]
        reads = [(user, int(str(user.args[1]))) for call in calls for user in call.users]
        used = sorted({index for _, index in reads})
        (output,) = (n for n in body.graph.nodes if n.op == "output")
        results = output.args[0]
        if len(used) == len(results):
            continue
        output.args = (tuple(results[i] for i in used),)
        for user, index in reads:
            user.args = (user.args[0], used.index(index))
        for call in calls:
            _keep(call, used)
        drop_dead(body)


def _keep(call: Node, used: list[int]) -> None:
    call.meta["val"] = tuple(call.meta["val"][i] for i in used)


PASS = Pass("drop_unread", run)
