"""What the graphs of an artifact rely on although no public source says it of the release of CANN that they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...platform import Platform
from .check import DEFAULT, CheckedGraph
from .table import table

CALL = "call"
"""Kind of an assumption on how a torch operator calls what runs it."""


@dataclass(frozen=True)
class Assumption:
    """A row of the table that is assumed, or what several operators assume of each other.

    Attributes:
        operator: type of GE operator, what runs a torch operator, or the attribute in which operators differ.
        what: kind of row: form, types, dtypes, folded, the rule's name, or `CALL`; "communicator" of operators that share one.
        assumed: what is assumed and why.
        operators: how many operators of the graphs rely on it.
    """

    operator: str
    what: str
    assumed: str
    operators: int


def assumptions(checked: Iterable[CheckedGraph], platform: Platform = DEFAULT) -> list[Assumption]:
    """Assumptions that graphs rely on, those with the most operators first.

    Args:
        checked: what `check.examine` found of the graphs.
    """
    platform = platform if platform.chip else DEFAULT
    relied, assumed = Counter[tuple[str, int]](), Counter[tuple[str, str]]()
    algorithms: dict[str, Counter[str]] = {}
    for of_graph in checked:
        relied.update(of_graph.relied)
        assumed.update(of_graph.assumed)
        for group, used in of_graph.algorithms.items():
            algorithms.setdefault(group, Counter()).update(used)
    rows = table().rows
    found = [
        Assumption(operator, rows[number].rule or rows[number].what, reason, count)
        for (operator, number), count in relied.items()
        if (reason := rows[number].assumption(platform.cann))
    ]
    found += [Assumption(operator, CALL, reason, count) for (operator, reason), count in assumed.items()]
    found += [_shared(group, used) for group, used in algorithms.items() if len(used) > 1]
    return sorted(found, key=lambda assumption: (-assumption.operators, assumption.operator, assumption.what, assumption.assumed))


def _shared(group: str, algorithms: Counter[str]) -> Assumption:
    """Graphs of a process run one after the other over one communicator and its window."""
    named = " and ".join(repr(name) for name in sorted(algorithms))
    reason = f"the expert operators of communicator {group!r} may use {named} in turn; public sources ask one algorithm of a pair only"
    return Assumption("comm_alg", "communicator", reason, algorithms.total())
