"""Draws what a launch line comes to as tables for the terminal."""

from __future__ import annotations

import textwrap
from itertools import zip_longest

from ...builder.memory import GIB
from ...serve.lines import OR_REPLICAS
from .findings import LaunchFinding
from .imported import Imported, Role
from .proposal import Proposal
from .verdicts import STATUSES

HEADINGS = {
    "carried": "carried: the same meaning and the same value",
    "mapped": "mapped: the same meaning, said otherwise",
    "unnecessary": "unnecessary here",
    "refused": "refused",
}
WIDTH = 140


def report(imported: Imported) -> list[str]:
    """Tables for the terminal, a role at a time, and the commands."""
    lines: list[str] = []
    assumed: set[str] = set()
    for role in imported.roles:
        lines += [*_role_lines(role, assumed), ""]
    counts = {status: sum(finding.status == status for finding in imported.findings) for status in STATUSES}
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items()))
    if imported.commands:
        lines += ["", *(f"  {command}" for command in imported.commands), *(f"  {note}" for note in imported.notes)]
    for role in imported.roles:
        lines += ["", f"or {OR_REPLICAS}", *(f"  {command}" for command in role.replicas)] if role.replicas else []
    return lines


def _role_lines(role: Role, assumed: set[str]) -> list[str]:
    """The tables of one role; of what is assumed that which was not of a role before."""
    where = f"line {role.lines[0]}" if len(role.lines) == 1 else f"lines {', '.join(map(str, role.lines))}"
    lines = [f"{role.engine}, {role.name} ({where})"]
    for status in STATUSES:
        findings = [finding for finding in role.findings if finding.status == status]
        if findings:
            lines += [f"  {HEADINGS[status]}", *_table(findings)]
    proposal = role.proposal
    if proposal is None:
        return lines
    if proposal.deployment:
        lines.append(f"  this is the published deployment {proposal.deployment.id} ({proposal.deployment.source})")
    lines += [f"  assumed: {text}" for text in proposal.assumed if text not in assumed]
    assumed.update(proposal.assumed)
    lines += _planned(proposal)
    return lines


def _planned(proposal: Proposal) -> list[str]:
    """What the plan of a build comes to, or why there is none that a rank can hold."""
    plan, memory = proposal.plan, proposal.memory
    if proposal.problem:
        return [f"  not planned: {proposal.problem}"]
    if plan is None:
        return []
    held = f", {memory.total_bytes / GIB:.1f} of {memory.limit_bytes / GIB:.0f} GiB a rank before activations" if memory else ""
    return [f"  planned: {len(plan.buckets)} buckets, mesh {plan.mesh}, context {plan.limits.max_model_len}{held}"]


def _table(findings: list[LaunchFinding]) -> list[str]:
    """Flags beside what becomes of them, which is said once for all of which the same is true."""
    wide = min(max(len(finding.given) for finding in findings), 58)
    lines = []
    for why in dict.fromkeys(finding.why for finding in findings):
        flags = [
            given if len(given) <= wide else given[: wide - 3] + "..." for given in (each.given for each in findings if each.why == why)
        ]
        rows = zip_longest(flags, textwrap.wrap(why, WIDTH - wide - 6), fillvalue="")
        lines += [f"    {given.ljust(wide)}  {text}".rstrip() for given, text in rows]
    return lines
