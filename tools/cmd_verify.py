"""Turns `npucompile verify` into a repeated proof."""

from __future__ import annotations

import json

import click

from ..lowering.artifact import Artifact
from .cli import Home
from .locate import artifact_path
from .progress import Progress
from .verify import verify


@click.command("verify")
@click.argument("artifact", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@click.pass_obj
def command(home: Home, artifact: str | None, as_json: bool) -> None:
    """Repeat the build's proof on ARTIFACT (a directory or a built model's name; the newest when none is given).

    Checks every file's digest, then compares each bucket's executable with the eager reference: full batches, padded ones,
    and row by row, with all that a live row must not read poisoned with NaN.
    """
    opened = Artifact.open(artifact_path(home.artifacts, artifact))
    opened.check_runnable()
    found = verify(opened, Progress())
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for name, told in found.items():
        click.echo(f"{name:<20} rows {told['rows']:>4.0f}   logits {told['logits_error']:.1e}   state {told['state_error']:.1e}   ok")
