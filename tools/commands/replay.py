"""`npucompile replay`: repeats what a server recorded, and names the first step that comes out differently."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click
import torch

from ...lowering.artifact.artifact import Artifact
from ...runtime import journal
from ...runtime.replay import Divergence, Replay, replay
from ..cli import Home
from ..locate import artifact_path
from ..progress import Progress
from ..ranks.environment import applied
from ..ranks.executors import settled
from ..ranks.launch import opened_ranks
from ..ranks.rank_settings import RankSettings
from ..serve.recording import check, engine_of
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
    off: tuple[str, ...],
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
    asked = RankSettings(threads or facts["threads"], device=device, checkpoint=checkpoint, cache=home.cache, off=frozenset(off))
    settings = settled(artifact, asked)
    home = applied(home, artifact, settings, progress)
    with ExitStack() as stack:
        executor = stack.enter_context(opened_ranks(artifact, None, settings, home.environment, progress))()

        def stepped(number: int) -> None:
            if number % STEPS_A_LINE == 0:
                progress.say(f"{number} steps repeated")

        result = replay(engine_of(file, facts, executor), entries, stepped)
    click.echo(json.dumps(asdict(result)) if as_json else "\n".join(lines(result)))
    if result.divergence:
        sys.exit(1)


def lines(found: Replay) -> list[str]:
    """The outcome as text."""
    counts = f"{found.steps} steps of {found.requests} requests repeated, {found.tokens} tokens equal"
    if found.divergence is None:
        return [counts, "nothing differs" + (", up to where the record was cut" if found.cut else "")]
    return [counts, *difference(found.divergence)]


def difference(divergence: Divergence) -> list[str]:
    """The first difference as text."""

    def shown(entry: object) -> str:
        return "nothing" if entry is None else str(entry)[:SHOWN_CHARS]

    at = f"step {divergence.step} is the first that differs"
    return [at, f"  recorded: {shown(divergence.recorded)}", f"  repeated: {shown(divergence.repeated)}"]
