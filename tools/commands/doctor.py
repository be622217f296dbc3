"""`npucompile doctor`: what this machine can build and run, and what to install for the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from ..cli import Home
from ..doctor import Finding, examine, healthy, verdict


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine can build and run, and what to install for the rest; fails when it cannot serve on its CPU."""
    home: Home = ctx.obj
    findings = examine(home.environment)
    if as_json:
        click.echo(json.dumps({"healthy": healthy(findings), "checks": [asdict(finding) for finding in findings]}, indent=1))
    else:
        click.echo("\n".join([*table(findings), "", *verdict(findings)]))
    if not healthy(findings):
        ctx.exit(1)


def table(findings: Sequence[Finding]) -> list[str]:
    """One line a check, and one below it where there is something to do."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.name:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8} {'':<{width}}  {finding.advice}")
    return lines
