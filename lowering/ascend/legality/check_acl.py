"""Checks every torch operator of a captured graph against the table: what a device would refuse when it runs or captures it, the build
refuses."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ....graphs.ir.alias import is_view
from ...artifact import graph_io
from ...platform import Platform
from ..acl_graph.file import AclFile, graph_of
from ..acl_graph.formats import in_nz
from .check import DEFAULT, Checked, Checker, Violation, refuse
from .table import Table, table
from .threads import answered
from .torch_nodes import key_of, node_of
from .torch_operators import TorchOperator, torch_operators
from .torch_rules import group_list_kind


def check(acl_file: AclFile, platform: Platform = DEFAULT, facts: Table | None = None) -> list[Violation]:
    """What a device would refuse of a graph; empty where every operator is legal.

    Args:
        platform: chip, release of CANN and operator packages.
        facts: the table; by default the one of this package.

    Raises:
        LoweringError: an operator is registered nowhere, or a tensor has a dtype that no operator takes.
    """
    return examine(acl_file, platform, facts).violations


def prove(acl_file: AclFile, platform: Platform = DEFAULT, *, sizes: bool = True) -> None:
    """Refuses a graph that a device would refuse.

    Args:
        sizes: whether limits of sizes count, see `Fact.sizes`.

    Raises:
        LoweringError: naming operators, what was given, what is legal and the source.
    """
    refuse(examine(acl_file, platform), platform, sizes=sizes)


def examine(acl_file: AclFile, platform: Platform = DEFAULT, facts: Table | None = None) -> Checked:
    """`check`, with how many operators each violation has, and which rows of the table the graph relies on."""
    platform = platform if platform.chip else DEFAULT
    facts, graph, nz = facts or table(), graph_of(acl_file), in_nz(acl_file)
    checker, names = Checker(facts, platform, {}), _names(acl_file, graph)
    for node, name in names:
        row = torch_operators().get(str(node.target))
        if not _launches(node, row):
            continue
        rows = facts.facts(row.runs, platform.chip, platform.cann, platform.packages) if row else ()
        checker.add(key_of(node, nz), functools.partial(node_of, node, name, row, rows, nz))
        if row and row.assumed:
            checker.checked.assumed[row.runs, row.assumed] += 1
    by_node = dict(names)
    for node, message in group_list_kind(graph):
        row = torch_operators()[str(node.target)]
        source = "rule group_list_kind" + answered("group_list_kind", row.runs)
        checker.refuse([Violation(by_node[node], f"{node.target} by {row.runs}", message, source)])
    return checker.checked


def _names(acl_file: AclFile, graph: GraphModule) -> list[tuple[FxNode, str]]:
    """Operators in order, each with the body that it belongs to and its own name."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [(node, f"{body}/{node.name}" if body else node.name) for node, body in zip(nodes, _bodies(acl_file), strict=True)]


def _bodies(acl_file: AclFile) -> Iterator[str]:
    for body, nodes in acl_file.calls:
        yield from [body] * nodes


def _launches(node: FxNode, row: TorchOperator | None) -> bool:
    """Whether something runs for an operator: neither for a view of memory, nor for what a row says so of."""
    if row is not None:
        return bool(row.runs)
    name = str(node.target)
    return name != "operator.getitem" and not (name.startswith("aten.") and is_view(graph_io.find_target(name)))
