"""`npucompile bringup`: finds the first thing that is wrong on a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...lowering.device import CPU
from ..cli import Home
from ..locate import artifact_path
from ..progress import Progress
from ..prove.bringup import report
from ..prove.bringup.collectives import CollectivesCheck
from ..prove.bringup.rungs import RUNGS, Bringup
from ..ranks.environment import applied
from ..ranks.executors import choose_device
from ..ranks.launch import run_rank
from ..ranks.rank_settings import RankSettings
from ..ranks.torchrun import launcher_config
from .device_options import device_options


@click.command("bringup")
@click.argument("artifact", required=False)
@device_options
@click.option("--only", "wanted", type=click.Choice(RUNGS), multiple=True, help="Run this rung alone; may be given several times.")
@click.option("--report", "directory", type=click.Path(file_okay=False, path_type=Path),
              help="Write bringup.html and bringup.json here.  [default: reports/ARTIFACT in npucompile's directory]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    artifact: str | None,
    device: str,
    checkpoint: Path | None,
    wanted: tuple[str, ...],
    directory: Path | None,
    as_json: bool,
) -> None:
    """Find the first thing that is wrong on a device.

    Goes up from the environment and single operators to layers, collectives, whole buckets and a short serve of ARTIFACT, each against
    the CPU, and stops at the first rung that fails. Says which assumption of docs/on-hardware.md was wrong, and writes a report with
    times to send back. An artifact without weights gets random ones.

    Example: npucompile bringup artifacts/npu --device npu --report report
    """
    home: Home = ctx.obj
    opened = Artifact.open(artifact_path(home.artifacts, artifact))
    opened.check_runnable()
    progress = Progress(quiet=as_json)
    kind = choose_device(opened, device)
    if kind == CPU:
        raise SpecError(f"{opened.path} was built for {opened.manifest.target}; a bring-up is of an artifact for NPUs")
    has_weights = checkpoint or opened.manifest.weights or opened.manifest.checkpoint
    settings = RankSettings(device=kind, checkpoint=checkpoint, cache=home.cache, random_weights=not has_weights)
    config = launcher_config(home.environment, settings)
    home = applied(home, opened, settings, progress, config.node.address if config else "")
    if config and config.rank:
        run_rank(opened, config, replace(settings, before_loading=CollectivesCheck()))
        return
    bringup = Bringup(opened, settings, home.environment, progress, config, wanted or RUNGS)
    findings = report.as_dict(opened, kind, bringup.run())
    page, data = report.write(directory or home.root / "reports" / opened.path.name, findings)
    if as_json:
        click.echo(json.dumps(findings, indent=1))
    else:
        for rung in findings["rungs"]:
            click.echo(f"{rung['name']:<12} {'passed' if rung['passed'] else 'FAILED'} {rung['seconds']:8.1f} s")
            for failure in rung["failures"]:
                click.echo(f"  {failure['what']}: {failure['message']}")
                click.echo(f"  wrong assumption: {failure['heading']} ({failure['assumption']} in docs/on-hardware.md)")
        click.echo(f"report: {page} and {data}")
    if not findings["passed"]:
        if as_json:
            name, failure = next((rung["name"], rung["failures"][0]) for rung in findings["rungs"] if rung["failures"])
            click.echo(f"{name}: {failure['what']}: {failure['message']}", err=True)
        ctx.exit(1)
