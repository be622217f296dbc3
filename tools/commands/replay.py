"""`npucompile replay`: repeats what a server recorded, and names the first step that comes out differently."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from ... import __version__
from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...runtime import journal
from ...runtime.engine import Engine
from ...runtime.replay import Divergence, Replay, replay
from ...runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from ..cli import Home
from ..locate import artifact_path
from ..progress import Progress
from ..ranks.environment import applied
from ..ranks.executors import settled
from ..ranks.launch import opened_ranks
from ..ranks.rank_settings import RankSettings
from .device_options import device_options

SHOWN_CHARS = 400
STEPS_A_LINE = 1000


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--artifact", "name", help="Artifact to repeat it on.  [default: the recorded one]")
@click.option("--any-artifact", is_flag=True, help="Let it be another artifact than the recorded one, to find where they part.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of a step.  [default: as recorded]")
@device_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    home: Home,
    file: Path,
    name: str | None,
    any_artifact: bool,
    threads: int | None,
    device: str,
    checkpoint: Path | None,
    as_json: bool,
) -> None:
    """Repeat the run that `npucompile serve --record FILE` recorded, without a server and without its clients.

    The same requests and cancels are handled in the same steps, and every step and token is compared. The first that differs is
    named, and the exit status is 1. Times are the recorded ones, so a day of little traffic takes minutes.

    Example: npucompile replay run.journal --artifact qwen3.5-tiny
    """
    facts, entries = journal.read(file)
    artifact = Artifact.open(artifact_path(home.artifacts, name or facts["path"]))
    artifact.check_runnable()
    check(file, facts, artifact, any_artifact)
    torch.set_num_threads(threads or facts["threads"])
    progress = Progress(quiet=as_json)
    settings = settled(artifact, RankSettings(threads or facts["threads"], device=device, checkpoint=checkpoint, cache=home.cache))
    home = applied(home, artifact, settings, progress)
    with ExitStack() as stack:
        executor = stack.enter_context(opened_ranks(artifact, None, settings, home.environment, progress))()
        if facts["run_ahead"] > executor.run_ahead:
            raise SpecError(f"{file} was recorded with run_ahead {facts['run_ahead']}; legal here is up to {executor.run_ahead}")
        policy = {name: facts[name] for name in ("run_ahead", "prefill_burst", "measured", "itl_target_ms", "fixed_tokens")}
        kept = PrefixCacheSettings(**facts["prefix_cache"]) if facts["prefix_cache"] else None
        engine = Engine(executor, refresh_every_s=None, prefix_cache=kept, **policy)

        def stepped(number: int) -> None:
            if number % STEPS_A_LINE == 0:
                progress.say(f"{number} steps repeated")

        found = replay(engine, entries, stepped)
    click.echo(json.dumps(asdict(found)) if as_json else "\n".join(lines(found)))
    if found.divergence:
        sys.exit(1)


def facts_of(artifact: Artifact, engine: Engine) -> dict[str, Any]:
    """What a journal says of the run that it records."""
    return {
        "npucompile": __version__,
        "torch": str(torch.__version__),
        "artifact": artifact.digest,
        "path": str(artifact.path.resolve()),
        "threads": torch.get_num_threads(),
        "run_ahead": engine.stepper.run_ahead,
        "prefill_burst": engine.stepper.policy.prefill_burst,
        "measured": engine.stepper.policy.measured,
        "itl_target_ms": engine.stepper.policy.itl_target_ms,
        "fixed_tokens": engine.stepper.policy.fixed_tokens,
        "prefix_cache": asdict(engine.stepper.prefix_cache) if engine.stepper.prefix_cache else None,
        "backends": dict(engine.executor.backends),
    }


def check(file: Path, facts: dict[str, Any], artifact: Artifact, any_artifact: bool) -> None:
    """Refuses to repeat a run on another artifact, unless that is wanted.

    Raises:
        SpecError: naming both.
    """
    if facts["artifact"] != artifact.digest and not any_artifact:
        raise SpecError(
            f"{file} was recorded on artifact {facts['artifact']}, and {artifact.path} is {artifact.digest}; legal is the same one, "
            "or --any-artifact to compare them"
        )


def lines(found: Replay) -> list[str]:
    """The outcome as text."""
    counts = f"{found.steps} steps of {found.requests} requests repeated, {found.tokens} tokens equal"
    if found.divergence is None:
        return [counts, "nothing differs"]
    return [counts, *difference(found.divergence)]


def difference(divergence: Divergence) -> list[str]:
    """The first difference as text."""

    def shown(entry: object) -> str:
        return "nothing" if entry is None else str(entry)[:SHOWN_CHARS]

    at = f"step {divergence.step} is the first that differs"
    return [at, f"  recorded: {shown(divergence.recorded)}", f"  repeated: {shown(divergence.repeated)}"]
