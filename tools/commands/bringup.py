"""`npucompile bringup`: finds what is wrong on a device."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...lowering.device import CPU
from ...lowering.platform import Platform
from ..cli import Home
from ..locate import artifact_path
from ..progress import Progress
from ..prove import golden
from ..prove.bringup import archive, bisect, report
from ..prove.bringup.collectives import CollectivesCheck
from ..prove.bringup.findings import NAME, Findings
from ..prove.bringup.results import COLLECTIVES, GOLDEN, Wanted
from ..prove.bringup.rungs import Bringup
from ..ranks.environment import applied
from ..ranks.executors import choose_device
from ..ranks.launch import run_rank
from ..ranks.rank_settings import RankSettings
from ..ranks.torchrun import launcher_config
from .device_options import device_options


@click.command("bringup")
@click.argument("artifact", required=False)
@device_options
@click.option("--only", "texts", multiple=True, metavar="RUNG[:CASE]",
              help="Run this rung alone, or its cases with CASE in their names; may be given several times.")  # fmt: skip
@click.option("--bisect", "bucket", metavar="BUCKET",
              help="Run this bucket; if it fails, again with each switch of --off in turn, and say which of them helps.")  # fmt: skip
@click.option("--golden", "golden_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Also serve the prompts of this file of `npucompile golden`, and compare tokens and log probabilities.")  # fmt: skip
@click.option("--stop", is_flag=True, help="Run nothing behind a rung that fails.")
@click.option("--resume", is_flag=True, help="Run nothing again that passed with the same artifact, CANN and wheels.")
@click.option("--limit", "limit_s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="End a process with a device that shows no sign of life for so long.  [default: 900 beside a step]")  # fmt: skip
@click.option("--report", "directory", type=click.Path(file_okay=False, path_type=Path),
              help="Write bringup.html, .json and so on here.  [default: reports/ARTIFACT in npucompile's directory]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    artifact: str | None,
    device: str,
    checkpoint: Path | None,
    off: tuple[str, ...],
    texts: tuple[str, ...],
    bucket: str | None,
    golden_file: Path | None,
    stop: bool,
    resume: bool,
    limit_s: float | None,
    directory: Path | None,
    as_json: bool,
) -> None:
    """Find what is wrong on a device.

    Goes up from the environment and single operators to layers, collectives, whole buckets and a short serve of ARTIFACT, each against
    the CPU, in processes of their own: what ends one is the finding of its case, and the next one goes on. Says which assumption of
    docs/on-hardware.md was wrong, and writes a report with times to send back. An artifact without weights gets random ones.

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
    settings = RankSettings(device=kind, checkpoint=checkpoint, cache=home.cache, random_weights=not has_weights, off=frozenset(off))
    config = launcher_config(home.environment, settings)
    home = applied(home, opened, settings, progress, config.node.address if config else "")
    wanted, answers = Wanted.of(texts), golden.read(golden_file) if golden_file else None
    if answers and not texts:
        wanted = replace(wanted, cases={**wanted.cases, GOLDEN: ()})
    if GOLDEN in wanted.cases and not answers:
        raise SpecError(f"--only {GOLDEN} takes --golden FILE, which `npucompile golden` writes")
    if config and config.rank:
        check = CollectivesCheck(wanted=wanted) if COLLECTIVES in wanted.cases else None
        run_rank(opened, config, replace(settings, before_loading=check))
        return
    directory = directory or home.root / "reports" / opened.path.name
    found = Findings(directory / NAME)
    bringup = Bringup(opened, settings, home.environment, progress, config, wanted, found, resume, stop, answers, limit_s)

    if bucket:
        if not _bisected(bringup, bucket, directory, as_json=as_json):
            ctx.exit(1)
        return

    def write() -> dict[str, Any]:
        findings = {**report.as_dict(opened, kind, bringup.results), "passed": bringup.passed}
        report.write(directory, findings)
        return findings

    bringup.on_rung = write
    since = time.time()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        bringup.run()
    except KeyboardInterrupt:
        progress.say("interrupted; --resume goes on")
    finally:
        signal.signal(signal.SIGTERM, before)
        findings = write()
        reports = [directory / name for name in (report.JSON_NAME, NAME, bisect.NAME, report.HTML_NAME)]
        sent = archive.write(directory, reports, home.environment, Platform.of(opened.manifest.platform).chip, since)
        _say(findings, directory, as_json=as_json)
        progress.say(f"to send back: {sent} ({sent.stat().st_size / 1e6:.1f} MB; variables and logs of CANN are in it, no keys)")
    if not findings["passed"]:
        ctx.exit(1)


def _bisected(bringup: Bringup, bucket: str, directory: Path, *, as_json: bool) -> bool:
    """Says trial after trial what it came to; returns whether nothing failed. What was tried is in the report when it is interrupted."""
    trials: list[bisect.BisectTrial] = []
    for trial in bisect.bisect(bringup, bucket):
        trials.append(trial)
        said = bisect.advice(bringup.artifact, bucket, trials)
        found = {"artifact": bringup.artifact.digest, "bucket": bucket, "trials": [tried.as_dict() for tried in trials], "advice": said}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / bisect.NAME).write_text(json.dumps(found, indent=1) + "\n")
        if not as_json:
            click.echo(trial.line)
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(said))
    return all(trial.outcome != bisect.FAILS for trial in trials)


def _say(findings: Mapping[str, Any], directory: Path, *, as_json: bool) -> None:
    failed = [(rung["name"], failure) for rung in findings["rungs"] for failure in rung["failures"]]
    if as_json:
        click.echo(json.dumps(findings, indent=1))
        for name, failure in failed[:1]:
            click.echo(f"{name}: {failure['what']}: {failure['message']}", err=True)
        return
    for rung in findings["rungs"]:
        outcome = "passed" if rung["passed"] else "FAILED" if rung["failures"] else "unfinished"
        click.echo(f"{rung['name']:<12} {outcome} {rung['seconds']:8.1f} s")
        for failure in rung["failures"]:
            click.echo(f"  {failure['what']}: {failure['message']}")
            click.echo(f"  wrong assumption: {failure['heading']} ({failure['assumption']} in docs/on-hardware.md)")
        if rung["explained_by"]:
            click.echo(f"  may follow from: {', '.join(rung['explained_by'])}")
    click.echo(f"report: {directory / report.HTML_NAME} and {directory / report.JSON_NAME}")
