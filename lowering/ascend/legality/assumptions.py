"""What the graphs of an artifact rely on although no public source says it of the release of CANN that they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...platform import Platform
from ..ge_file import GeFile
from .check import DEFAULT, examine
from .table import table


@dataclass(frozen=True)
class Assumption:
    """A row of the table that is assumed, or what several operators assume of each other.

    Attributes:
        operator: type of GE operator, or the attribute in which operators differ.
        what: kind of row: form, types, folded, or the rule's name; "communicator" of operators that share one.
        assumed: what is assumed and why.
        operators: how many operators of the graphs rely on it.
    """

    operator: str
    what: str
    assumed: str
    operators: int


def assumptions(ge_files: Iterable[GeFile], platform: Platform = DEFAULT) -> list[Assumption]:
    """Assumptions that graphs rely on, those with the most operators first.

    Raises:
        LoweringError: see `check.check`.
    """
    platform = platform if platform.chip else DEFAULT
    relied: Counter[tuple[str, int]] = Counter()
    algorithms: dict[str, Counter[str]] = {}
    for ge_file in ge_files:
        checked = examine(ge_file, platform)
        relied.update(checked.relied)
        for group, used in checked.algorithms.items():
            algorithms.setdefault(group, Counter()).update(used)
    rows = table().rows
    found = [
        Assumption(operator, rows[number].rule or rows[number].what, reason, count)
        for (operator, number), count in relied.items()
        if (reason := rows[number].assumption(platform.cann))
    ]
    found += [_shared(group, used) for group, used in algorithms.items() if len(used) > 1]
    return sorted(found, key=lambda assumption: (-assumption.operators, assumption.operator, assumption.what, assumption.assumed))


def _shared(group: str, algorithms: Counter[str]) -> Assumption:
    """Graphs of a process run one after the other over one communicator and its window."""
    named = " and ".join(repr(name) for name in sorted(algorithms))
    reason = f"the expert operators of communicator {group!r} may use {named} in turn; public sources ask one algorithm of a pair only"
    return Assumption("comm_alg", "communicator", reason, algorithms.total())
