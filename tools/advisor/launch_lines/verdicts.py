"""What a rule of the tables gets and says.

A rule gets the value of a flag and the line that it stands in, and says what becomes of the flag. What a whole line comes to is in facts.py
and proposal.py; rules only say it, flag by flag, and add options of `serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .facts import LaunchFacts
from .proposal import Proposal
from .tables import topics

CARRIED, MAPPED, UNNECESSARY, REFUSED = "carried", "mapped", "unnecessary", "refused"
STATUSES = (CARRIED, MAPPED, UNNECESSARY, REFUSED)


@dataclass(frozen=True)
class Verdict:
    """What becomes of a flag: its status, why, and what it adds to the serve command."""

    status: str
    why: str
    serve: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """Where a flag stands: the facts of its line, and the build that is proposed for it."""

    facts: LaunchFacts
    proposal: Proposal

    @property
    def row(self) -> str:
        """What is said of a setting that the published deployment has."""
        return f"as in deployment {self.proposal.deployment.id}" if self.proposal.deployment else ""

    def option(self, name: str) -> str:
        """An argument of the build as it is written; where a deployment stands for it, that."""
        value = self.proposal.arguments.get(name)
        return f"--{name} {value}" if value is not None else self.row or f"the default of --{name}"


Rule = Callable[[Any, Context], Verdict]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Enters a function into the table under its name."""
    RULES[function.__name__] = function
    return function


def rule_of(*names: str) -> Callable[[Rule], Rule]:
    """Enters a function into the table under several names: facts tell the values of their flags apart."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def topic(name: str) -> Verdict:
    """What becomes of all flags of a subject."""
    entry = topics()[name]
    return Verdict(entry.status, entry.why)
