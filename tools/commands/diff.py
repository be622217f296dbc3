"""`npucompile diff`: shows what two artifacts differ in."""

from __future__ import annotations

import json

import click

from ...lowering.artifact.artifact import Artifact
from ..cli import Home
from ..inspection.differences import differences, lines
from ..locate import artifact_path


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--bucket", help="One bucket: its name, or the batch size of a decode bucket.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: each difference as a pair of values.")
@click.pass_obj
def command(home: Home, a: str, b: str, bucket: str | None, as_json: bool) -> None:
    """Show what artifacts A and B differ in: buckets, operators, launches, bytes, options, limits, versions, weights and cost.

    \b
    Examples: npucompile diff qwen3.5-397b /srv/artifacts/before
              npucompile diff before after --bucket 32 --json
    """
    first, second = (Artifact.open(artifact_path(home.artifacts, name)) for name in (a, b))
    told = differences(first, second, bucket)
    click.echo(json.dumps(told) if as_json else "\n".join(lines(told)))
