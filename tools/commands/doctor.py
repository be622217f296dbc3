"""`npucompile doctor`: what this machine can build and run, and what to install for the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from ...graphs.errors import SpecError
from ...lowering.device_error import known, known_errors
from ..cli import Home
from ..doctor import Finding, examine, healthy, inventory_of, of_host, verdict
from ..host import HostFinding, read_host


@click.command("doctor")
@click.option("--error", "text", metavar="TEXT", help="Say what a code of a device means, as 507015, or the code in the text of an error.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.pass_context
def command(ctx: click.Context, text: str | None, as_json: bool) -> None:
    """Say what this machine can build and run, and what to install for the rest; fails when it cannot serve on its CPU.

    Where ASCEND_HOME_PATH names a CANN, its inventory is taken too: what its compiler imports, kernels of each chip, vendors that
    redefine operators, and its tables of operators beside those that graphs are checked against. No device is opened. What the kernel is
    set to is shown beside what guides for NPUs set; nothing of it keeps a machine from building or serving.
    """
    if text is not None:
        click.echo(meaning_of(text))
        return
    home: Home = ctx.obj
    findings, stock, host = examine(home.environment), inventory_of(home.environment), read_host()
    if as_json:
        parts: dict[str, Sequence[Finding | HostFinding]] = {"checks": findings, "inventory": stock, "host": host}
        listed = {name: [asdict(each) for each in part] for name, part in parts.items()}
        click.echo(json.dumps({"healthy": healthy(findings), **listed}, indent=1))
    else:
        click.echo("\n".join([*table([*findings, *stock, *of_host(host)]), "", *verdict([*findings, *stock])]))
    if not healthy(findings):
        ctx.exit(1)


def meaning_of(text: str) -> str:
    """What the code in a text means, and the command to type next.

    Raises:
        SpecError: none is known.
    """
    if (found := known(text)) is None:
        codes = ", ".join(code for row in known_errors() for code in row.codes)
        raise SpecError(f"--error {text}: no code that is known; known are {codes}")
    code, row = found
    return f"{code}: {row.meaning}\nnext: {row.next}\nsource: {row.source}"


def table(findings: Sequence[Finding]) -> list[str]:
    """One line a check, and one below it where there is something to do."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.name:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8} {'':<{width}}  {finding.advice}")
    return lines
