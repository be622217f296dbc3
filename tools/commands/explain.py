"""`npucompile explain`: says what a build decided, who decided it, and what would change it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

import click

from ...lowering.artifact.artifact import Artifact
from ...lowering.artifact.manifest import Manifest
from ...models import registry
from ..builder.deployments import deployment
from ..builder.deviations import deviations, source_of
from ..builder.explanation import Explained, explanation
from ..cli import Home
from ..locate import artifact_path

WIDTH = 120


@click.command("explain")
@click.argument("artifact", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(home: Home, artifact: str | None, as_json: bool) -> None:
    """Say what was decided when ARTIFACT was built, who decided it, and what would change it.

    ARTIFACT is a directory or the name of a built model, by default the newest artifact. Every setting was decided by a flag of the build,
    by the row of a published deployment, by the checkpoint, by the plan, or by a default.

    \b
    Examples: npucompile explain qwen3.5-tiny
              npucompile explain qwen3.5-397b --json
    """
    opened = Artifact.open(artifact_path(home.artifacts, artifact))
    settings = explanation(opened.manifest)
    different = differs(opened.manifest)
    if as_json:
        plain = [asdict(setting) for setting in settings]
        data = {"artifact": str(opened.path), "model": opened.manifest.model["name"], "settings": plain, "deviations": list(different)}
        click.echo(json.dumps(data, indent=1))
        return
    click.echo("\n".join(lines(opened.path, opened.manifest, settings, different)))


def lines(path: Path, manifest: Manifest, settings: list[Explained], different: tuple[str, ...]) -> list[str]:
    """Sentences for the terminal, a setting a paragraph."""
    text = [f"{path}: {manifest.model['name']}"]
    for setting in settings:
        text += textwrap.wrap(f"{setting.what} {setting.why} {setting.change}", WIDTH, initial_indent="- ", subsequent_indent="  ")
    for deviation in different:
        text += textwrap.wrap(f"Not as the deployment says: {deviation}.", WIDTH, initial_indent="- ", subsequent_indent="  ")
    return [*text, f"Built again by: npucompile build {' '.join(manifest.build_arguments)}"]


def differs(manifest: Manifest) -> tuple[str, ...]:
    """What the model and the machine change against the published deployment; nothing where there is none."""
    if not manifest.deployment:
        return ()
    row = deployment(manifest.deployment)
    if row.model not in registry.presets():
        return ()
    words = manifest.build_arguments
    phase = row.phase(words[words.index("--phase") + 1] if "--phase" in words else None)
    return deviations(row, phase, source_of(row))
