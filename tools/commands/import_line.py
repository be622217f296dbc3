"""`npucompile import`: reads a launch line of SGLang or vLLM, and says how the same is built and served here."""

from __future__ import annotations

import json
import sys
import textwrap
from itertools import zip_longest

import click

from ...graphs.errors import SpecError
from ...graphs.paths import file_named
from ..builder.memory import GIB
from ..builder.settings.place import TARGETS
from ..launch_lines.findings import Finding
from ..launch_lines.imported import Imported, Role, import_text
from ..launch_lines.proposal import Proposal
from ..launch_lines.verdicts import STATUSES
from ..serve.lines import OR_REPLICAS

HEADINGS = {
    "carried": "carried: the same meaning and the same value",
    "mapped": "mapped: the same meaning, said otherwise",
    "unnecessary": "unnecessary here",
    "refused": "refused",
}
WIDTH = 140


@click.command("import")
@click.argument("line", metavar="LINE", nargs=-1, required=True)
@click.option("--model", metavar="MODEL", help="Checkpoint directory or preset that the line's model is.  [default: by its name]")
@click.option(
    "--target", "target_name", type=click.Choice(TARGETS[1:]), help="Machine, where the line does not say it.  [default: ascend-a3]"
)
@click.option("--out", metavar="DIR", help="Directory of the artifact in the commands.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Variable of the script, whatever it sets it to itself; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    line: tuple[str, ...], model: str | None, target_name: str | None, out: str | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Say what becomes of every flag and variable of LINE, a launch of SGLang or vLLM in quotes, a file with such lines, or - for input.

    Nothing is run. A script may set variables and launch several servers, prefill and decode apart, and routers: the commands at the end
    build what they serve and start each server, a line a machine.

    \b
    Examples: npucompile import 'vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --max-model-len 8192'
              npucompile import run_decode.sh --model qwen3.5-397b
    """
    imported = import_text(text_of(line), model, target_name, out, _pairs(settings))
    click.echo(json.dumps(imported.as_dict(), indent=1) if as_json else "\n".join(report(imported)))


def text_of(line: tuple[str, ...]) -> str:
    """The text to read: standard input, a file, or the line itself, in one word or several.

    Raises:
        SpecError: a file cannot be read as text.
    """
    if line == ("-",):
        return sys.stdin.read()
    if len(line) > 1:
        return " ".join(line)
    if path := file_named(line[0]):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{path} cannot be read as a script: {error}") from None
    if line[0] and not any(map(str.isspace, line[0])):
        raise SpecError(f"{line[0]}: no such file; legal is a launch line in quotes, a file with such lines, or - for input")
    return line[0]


def _pairs(settings: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for each in settings:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise SpecError(f"--set {each}: legal is NAME=VALUE")
        pairs[name] = value
    return pairs


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


def _table(findings: list[Finding]) -> list[str]:
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
