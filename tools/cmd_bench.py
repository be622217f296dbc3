"""Turns `npucompile bench` into figures of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import click
import torch

from ..graphs.errors import ArtifactMissing, SpecError
from ..lowering.artifact import Artifact
from . import bench_build, bench_load, bench_machine, bench_peer, bench_step, bench_streams
from . import build as building
from . import plan as planning
from .bench_report import Table, as_data, as_markdown, as_text
from .bench_streams import Load
from .cli import Home
from .locate import artifact_path
from .progress import Progress

FIGURES = ("build", "load", "decode", "prefill", "streams", "peer")
SLOW = ("build",)
"""Figures that are measured only when named."""


class Words(click.ParamType):
    """A comma-separated list out of some words."""

    name = "list"

    def __init__(self, legal: tuple[str, ...]) -> None:
        self.legal = legal

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The words, in the order of the legal ones."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if unknown := [word for word in words if word not in self.legal]:
            self.fail(f"{unknown[0]!r} is none; legal is a comma-separated list of {', '.join(self.legal)}", param, ctx)
        return tuple(word for word in self.legal if word in words)


class Counts(click.ParamType):
    """A comma-separated list of counts."""

    name = "list"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The counts as given."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
            self.fail(f"{value!r} is none; legal is a comma-separated list of integers of at least 1, as in 1,4,16", param, ctx)
        return tuple(map(int, parts))


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        loads: request loads of streams and peer.
        repetitions: of steps.
        rounds: of what takes longer: fresh processes, whole loads.
        builds: rounds of builds.
        jobs: graphs compiled at a time.
    """

    loads: tuple[Load, ...]
    repetitions: int
    rounds: int
    builds: int
    jobs: int


@click.command("bench")
@click.argument("artifact_or_model", required=False)
@click.option("--only", type=Words(FIGURES), help=f"Figures: {','.join(FIGURES)}.  [default: all but {','.join(SLOW)}]")
@click.option("--streams", type=Counts(), default=(1, 4, 16), help="Concurrent requests.  [default: 1,4,16]")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens each request generates.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each prompt.")
@click.option("--repetitions", type=click.IntRange(1), default=20, show_default=True, help="Repetitions of a step.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Repetitions of a load: fresh processes, streams, peer.")
@click.option("--builds", type=click.IntRange(1), default=1, show_default=True, help="Repetitions of a build.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Graphs compiled at a time.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of a step.  [default: all cores]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help="Print Markdown, as in docs/benchmarks.md.")
@click.pass_obj
def command(
    home: Home,
    artifact_or_model: str | None,
    only: tuple[str, ...] | None,
    streams: tuple[int, ...],
    tokens: int,
    prompt_tokens: int,
    repetitions: int,
    rounds: int,
    builds: int,
    jobs: int,
    threads: int | None,
    as_json: bool,
    markdown: bool,
) -> None:
    """Measure ARTIFACT_OR_MODEL (the newest artifact when none is given; a model that is not built is built first).

    What is compared runs in turns within one process, and every figure is a median with its smallest and largest value:
    other work on the machine still shows, so measure on a quiet one. Progress goes to standard error.

    Example: npucompile bench qwen3.5-tiny --only decode,peer --markdown
    """
    if as_json and markdown:
        raise SpecError("give at most one of --json and --markdown")
    if threads:
        torch.set_num_threads(threads)
    settings = Settings(tuple(Load(n, prompt_tokens, tokens) for n in streams), repetitions, rounds, builds, jobs)
    progress = Progress()
    machine = bench_machine.describe()
    subject, tables = measure(home, artifact_or_model, only, settings, progress)
    if as_json:
        told = {"machine": asdict(machine), "subject": subject, "figures": [as_data(table) for table in tables]}
        click.echo(json.dumps(told, indent=1))
        return
    heading = [*bench_machine.lines(machine), ", ".join(f"{name} {value}" for name, value in subject.items())]
    draw = as_markdown if markdown else as_text
    end = "  " if markdown else ""
    click.echo("\n".join([*(line + end for line in heading), "", *(draw(table) for table in tables)]), nl=False)


def measure(home: Home, name: str | None, only: tuple[str, ...] | None, settings: Settings, progress: Progress) -> tuple[dict[str, str], list[Table]]:
    """What was measured, and the figures that were asked for, in their order.

    Raises:
        NpucompileError: what was named cannot be measured, or not in this way.
    """
    wanted = only or tuple(figure for figure in FIGURES if figure not in SLOW)
    if "peer" in wanted and not bench_peer.installed():
        if only:
            raise SpecError(bench_peer.MISSING)
        progress.say(f"no peer: {bench_peer.MISSING}")
        wanted = tuple(figure for figure in wanted if figure != "peer")
    tables = []
    subject: dict[str, str] = {}
    if "build" in wanted:
        arguments = build_arguments(home, name)
        subject = {"build": " ".join(arguments)}
        tables.append(bench_build.build(arguments, jobs=settings.jobs, rounds=settings.builds, environment=home.environment, progress=progress))
    if wanted != ("build",):
        artifact = find_or_build(home, name, progress)
        subject = describe(artifact)
        tables += [figure() for key, figure in figures(artifact, home, settings, progress).items() if key in wanted]
    return subject, tables


def figures(artifact: Artifact, home: Home, settings: Settings, progress: Progress) -> dict[str, Callable[[], Table]]:
    """How each figure of an artifact is measured."""
    return {
        "load": lambda: bench_load.load(
            artifact.path,
            prompt_tokens=settings.loads[0].prompt_tokens,
            rounds=settings.rounds,
            threads=torch.get_num_threads(),
            environment=home.environment,
            progress=progress,
        ),
        "decode": lambda: bench_step.decode(artifact, settings.repetitions, progress),
        "prefill": lambda: bench_step.prefill(artifact, settings.repetitions, progress),
        "streams": lambda: bench_streams.streams(artifact, settings.loads, settings.rounds, progress),
        "peer": lambda: bench_peer.peer(artifact, settings.loads, settings.rounds, progress),
    }


def describe(artifact: Artifact) -> dict[str, str]:
    """What is measured, in few words."""
    manifest = artifact.manifest
    compiled = sum(entry.compiled is not None for entry in manifest.graphs)
    return {
        "model": str(manifest.model["name"]),
        "dtype": manifest.dtype,
        "weights": f"{sum(leaf.aval.nbytes for leaf in manifest.params) / 1e6:,.1f} MB",
        "context": str(manifest.limits.max_model_len),
        "buckets": f"{len(manifest.graphs)} ({compiled} compiled by {manifest.target})",
        "artifact": artifact.digest[:12],
    }


def build_arguments(home: Home, name: str | None) -> tuple[str, ...]:
    """Arguments of the build that made an artifact, or those of a model with all defaults.

    Raises:
        ArtifactMissing: nothing is named, and nothing built.
        SpecError: the artifact does not say how it was built.
    """
    try:
        found = Artifact.open(artifact_path(home.artifacts, name), check=False).manifest.build_arguments
    except ArtifactMissing:
        if name is None:
            raise
        return (name,)
    if not found:
        raise SpecError(f"the artifact {name!r} does not say how it was built; name a model")
    return found


def find_or_build(home: Home, name: str | None, progress: Progress) -> Artifact:
    """The artifact to measure.

    Raises:
        ArtifactError: it cannot run here.
        ModelError: what was named is no model either.
    """
    try:
        artifact = Artifact.open(artifact_path(home.artifacts, name))
    except ArtifactMissing:
        if name is None:
            raise
        plan = planning.plan(planning.Options(name))
        out = planning.default_out(home.artifacts, plan.found)
        artifact = Artifact.open(building.build(plan, out, home.cache, progress).path)
    artifact.check_runnable()
    return artifact
