"""`npucompile experts`: plans which rank holds which experts, from how often each was chosen."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ...lowering.artifact.artifact import Artifact
from ..builder.expert_map import read
from ..cli import Home
from ..inspection import experts
from ..locate import artifact_path


@click.command("experts")
@click.argument("artifact")
@click.argument("counts")
@click.option("--copies", type=click.IntRange(0), metavar="N", help="Experts beyond the model's own.  [default: one a rank]")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan, for --expert-map of build and serve.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(home: Home, artifact: str, counts: str, copies: int | None, out: Path | None, as_json: bool) -> None:
    """Plan where the experts of ARTIFACT lie, by COUNTS: a file with logical_count, as SGLang's recorder writes it and /expert_counts
    of a server answers (build --expert-counts).

    \b
    Prints how loaded the busiest rank is and what a step takes, by estimate: as built, planned, and planned with copies.
    Example: npucompile experts qwen3.5-397b expert_distribution_recorder_1.pt --copies 16 --out map.json
    """
    opened = Artifact.open(artifact_path(home.artifacts, artifact))
    found = experts.plans(opened, read(counts), copies)
    shown = experts.view(found)
    click.echo(json.dumps(shown.data) if as_json else "\n".join(shown.lines))
    if out:
        out.write_text(json.dumps(experts.as_map(opened, found[-1].layers)), encoding="utf-8")
