"""Turns `npucompile doctor` into a table of what this machine can build and run."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ..cli import Home
from ..doctor import Check, examine, healthy, look, verdict


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Say what this machine can build and run, and what to install for the rest; fails when it cannot serve on its CPU."""
    home: Home = ctx.obj
    checks = examine(look(home.environment))
    if as_json:
        click.echo(json.dumps({"healthy": healthy(checks), "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        click.echo("\n".join([*table(checks), "", *verdict(checks)]))
    if not healthy(checks):
        ctx.exit(1)


def table(checks: list[Check]) -> list[str]:
    """One line a check, and one below it where there is something to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<8} {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<8} {'':<{width}}  {check.advice}")
    return lines
