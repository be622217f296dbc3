"""Turns the nodes between a graph's calls into bodies of their own, so that the graph consists of calls alone."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module

from .flatten import bodies

NAMES = ("prologue", "epilogue")


def outline(graph: GraphModule) -> GraphModule:
    """A new graph that computes the same with nodes of four kinds: operand, call, unpacking of a call, output.

    Nodes before the first call become the body `prologue`, those after the last one `epilogue`; between two calls they are
    `between_1` and so on. An operand that is returned as it is stays a result.
    """
    runs = _runs(graph)
    outlined, values = Graph(), dict[Node, Node]()
    root = torch.nn.Module()
    for name, body in bodies(graph).items():
        setattr(root, name, body)
    names = iter(_names(runs, set(bodies(graph))))
    for run in runs:
        if isinstance(run, Node):
            values[run] = _copy(outlined, run, values)
        else:
            _call(outlined, root, next(names), run, values)
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    outlined.output(tuple(values[node] for node in output.args[0]))
    return _make_graph_module(root, outlined)


def _is_call(node: Node) -> bool:
    return node.op in ("placeholder", "call_module") or (
        node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].op == "call_module"
    )


def _runs(graph: GraphModule) -> list[Node | list[Node]]:
    """The nodes in order, with consecutive nodes that are not calls grouped into lists."""
    runs: list[Node | list[Node]] = []
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        if _is_call(node):
            runs.append(node)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _names(runs: list[Node | list[Node]], taken: set[str]) -> list[str]:
    """Names of the runs that become bodies, in order; none is the name of an existing body."""
    calls = [i for i, run in enumerate(runs) if isinstance(run, Node) and run.op == "call_module"]
    first, last = (calls[0], calls[-1]) if calls else (len(runs), len(runs))
    names, between = [], 0
    for i, run in enumerate(runs):
        if isinstance(run, list):
            between += first < i < last
            name = NAMES[0] if i < first else NAMES[1] if i > last else f"between_{between}"
            names.append(next(n for n in (name, *(f"{name}_{k}" for k in range(2, len(taken) + 3))) if n not in taken))
    return names


def _call(outlined: Graph, root: torch.nn.Module, name: str, run: list[Node], values: dict[Node, Node]) -> None:
    inside = set(run)
    reads = list(dict.fromkeys(source for node in run for source in node.all_input_nodes if source not in inside))
    results = [node for node in run if any(user not in inside for user in node.users)]
    body, local = Graph(), dict[Node, Node]()
    for source in reads:
        local[source] = body.placeholder(f"arg{len(local)}")
        local[source].meta = {"val": source.meta["val"]}
    for node in run:
        local[node] = _copy(body, node, local)
    body.output(tuple(local[node] for node in results))
    setattr(root, name, _make_graph_module(torch.nn.Module(), body))
    call = outlined.call_module(name, tuple(values[source] for source in reads))
    call.meta["val"] = tuple(node.meta["val"] for node in results)
    for i, node in enumerate(results):
        values[node] = outlined.call_function(operator.getitem, (call, i))
        values[node].meta["val"] = node.meta["val"]


def _copy(graph: Graph, node: Node, values: dict[Node, Node]) -> Node:
    copy = graph.node_copy(node, values.__getitem__)
    copy.meta = dict(node.meta)
    return copy
