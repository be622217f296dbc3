"""`npucompile bench`: measures builds, load time, steps and throughput on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import click
import torch

from ...graphs.errors import ArtifactMissing, SpecError
from ...lowering.artifact.artifact import Artifact
from ...models import registry
from ...models.family_file import FamilyFile
from ...server.text.tokenizer import TextTokenizer
from ..bench import build, step
from ..bench import load as bench_load
from ..bench import machine as bench_machine
from ..bench import streams as bench_streams
from ..bench.report import Table, as_data, as_markdown, as_text
from ..bench.streams import Load
from ..build import driver as building
from ..build import plan as planning
from ..cli import Home
from ..lab import kernels as bench_kernels
from ..lab import overhead as bench_overhead
from ..lab import peer
from ..lab import speculation as bench_speculation
from ..lab.peers import engines
from ..lab.peers import run as bench_peers
from ..locate import artifact_path, check_family
from ..progress import Progress
from .family_option import family_option

T = TypeVar("T")

FIGURES = ("build", "load", "decode", "prefill", "streams", "overhead", "speculation", "peer", "peers", "kernels")
SLOW = ("build", "overhead", "speculation", "peers", "kernels")
"""Figures that are measured only if `--only` names them."""

BUSY = 0.5
"""Load average above which a warning is printed."""


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        loads: request loads of streams, speculation, peer and peers.
        repetitions: of a step.
        rounds: of load, streams, overhead, speculation, peer and peers.
        builds: rounds of builds.
        jobs: graphs compiled at a time.
        prompts: file of prompts for speculation; None means the model's own.
        peers: the engines of peers.
    """

    loads: tuple[Load, ...]
    repetitions: int
    rounds: int
    builds: int
    jobs: int
    prompts: Path | None = None
    peers: bench_peers.Choice = field(default_factory=bench_peers.Choice)


@click.command("bench")
@click.argument("artifact_or_model", required=False)
@family_option
@click.option("--only", metavar="LIST", help=f"Figures: {', '.join(FIGURES)}.  [default: all but {', '.join(SLOW)}]")
@click.option("--streams", metavar="LIST", default="1,4,16", show_default=True, help="Numbers of concurrent requests.")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens each request generates.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each prompt.")
@click.option("--repetitions", type=click.IntRange(1), default=20, show_default=True, help="Repetitions of a step.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Repetitions of all figures but steps and builds.")
@click.option("--builds", type=click.IntRange(1), default=1, show_default=True, help="Repetitions of a build.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Graphs compiled at a time.")
@click.option(
    "--prompts", type=click.Path(path_type=Path, dir_okay=False), help="Prompts for speculation, one per line.  [default: the model's own]"
)
@click.option(
    "--peer",
    "peer_names",
    multiple=True,
    metavar="NAME",
    help=f"An engine to measure beside ours, of {', '.join(engines.PEERS)}; may be repeated. Without --only, peers is the only figure.  "
    f"[default: {', '.join(engines.DEFAULT)}]",
)
@click.option("--peer-python", multiple=True, metavar="NAME=PATH", help="Interpreter that has an engine.  [default: our own, else python3]")
@click.option(
    "--llama-cpp", type=click.Path(path_type=Path, file_okay=False), help="Checkout of llama.cpp, whose converter writes GGUF files."
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads of a step.  [default: all cores]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help="Print Markdown, as in docs/benchmarks.md.")
@click.pass_obj
def command(
    home: Home,
    artifact_or_model: str | None,
    family: str | None,
    only: str | None,
    streams: str,
    tokens: int,
    prompt_tokens: int,
    repetitions: int,
    rounds: int,
    builds: int,
    jobs: int,
    prompts: Path | None,
    peer_names: tuple[str, ...],
    peer_python: tuple[str, ...],
    llama_cpp: Path | None,
    threads: int | None,
    as_json: bool,
    markdown: bool,
) -> None:
    """Measure ARTIFACT_OR_MODEL, by default the newest artifact. A model that is not built yet is built first.

    `npucompile bench serve` instead sends a load to a server that runs. peer compares tokens and throughput with transformers; peers
    compares speed, start and memory with other engines, each in a process and a Python environment of its own.

    Every figure is a median with its smallest and largest value, and candidates that are compared run alternately. Other work on
    the machine still shows, so measure on a quiet one. Progress goes to standard error.

    \b
    Examples: npucompile bench qwen3.5-tiny --only decode,prefill
              npucompile bench qwen3.5-tiny --only streams --streams 1,8 --markdown
              npucompile bench OUT --peer llama.cpp --peer-python llama.cpp=VENV/bin/python --llama-cpp CHECKOUT --prompt-tokens 512
    """
    if as_json and markdown:
        raise SpecError("give at most one of --json and --markdown")
    if threads:
        torch.set_num_threads(threads)
    wanted = figure_names(only) if only is not None else ("peers",) if peer_names else None
    chosen = bench_peers.choice(peer_names, peer_python, llama_cpp)
    if (peer_names or peer_python or llama_cpp) and (wanted is None or "peers" not in wanted):
        raise SpecError("--peer, --peer-python and --llama-cpp are for peers; name it in --only, or leave them out")
    loads = tuple(Load(n, prompt_tokens, tokens) for n in counts(streams))
    settings = Settings(loads, repetitions, rounds, builds, jobs, prompts, chosen)
    progress = Progress()
    machine = bench_machine.describe()
    if machine.load > BUSY:
        progress.say(f"the load average is {machine.load:.1f}: other processes will distort the figures")
    subject, tables = measure(home, artifact_or_model, wanted, settings, progress, family)
    if as_json:
        report = {"machine": asdict(machine), "subject": subject, "figures": [as_data(table) for table in tables]}
        click.echo(json.dumps(report, indent=1))
        return
    heading = [*bench_machine.lines(machine), ", ".join(f"{name} {value}" for name, value in subject.items())]
    draw, end = (as_markdown, "  ") if markdown else (as_text, "")
    click.echo("\n".join(line + end for line in heading))
    for table in tables:
        click.echo("\n" + draw(table), nl=False)


def figure_names(text: str) -> tuple[str, ...]:
    """Reads a list like `decode,peer`; returns the figures in the order of FIGURES.

    Raises:
        SpecError: on anything else.
    """
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in FIGURES]:
        raise SpecError(f"--only has {unknown[0]!r}; legal is a comma-separated list of {', '.join(FIGURES)}")
    return tuple(figure for figure in FIGURES if figure in words)


def counts(text: str) -> tuple[int, ...]:
    """Reads a list like `1,4,16`.

    Raises:
        SpecError: on anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise SpecError(f"--streams is {text!r}; legal is a comma-separated list of integers of at least 1, as in 1,4,16")
    return tuple(map(int, parts))


def measure(
    home: Home, name: str | None, only: tuple[str, ...] | None, settings: Settings, progress: Progress, family: str | None = None
) -> tuple[dict[str, str], Iterator[Table]]:
    """A description of what is measured, and the tables, each yielded as soon as it is measured.

    Raises:
        NpucompileError: the named artifact or model cannot be measured.
    """
    wanted = only or tuple(figure for figure in FIGURES if figure not in SLOW)
    if "peer" in wanted and not peer.installed():
        if only:
            raise SpecError(peer.MISSING)
        progress.say(f"no peer: {peer.MISSING}")
        wanted = tuple(figure for figure in wanted if figure != "peer")
    subject: dict[str, str] = {}
    sources: dict[str, Callable[[], list[Table]]] = {}
    if set(wanted) - {"build", "kernels"}:
        artifact = _alone(lambda: find_or_build(home, name, progress, family))
        if {"load", "streams", "speculation", "peer", "peers"} & set(wanted):
            for load in settings.loads:
                load.check(artifact.manifest.limits.max_model_len)
        subject = describe(artifact)
        sources = figures(artifact, home, settings, progress)
    if "build" in wanted:
        arguments = build_arguments(home, name, family)
        subject["npucompile build"] = " ".join(arguments)
        sources["build"] = lambda: [
            build.build(arguments, jobs=settings.jobs, rounds=settings.builds, environment=home.environment, progress=progress)
        ]
    sources["kernels"] = lambda: bench_kernels.kernels(home.cache, settings.rounds, progress)
    return subject, (table for figure in wanted for table in _alone(sources[figure]))


def _alone(work: Callable[[], T]) -> T:
    """Runs `work` in a thread of its own.

    OpenMP keeps a worker pool for every thread that ran tensor operators. With more workers than cores they sleep between operators, so
    the pool of one figure would slow down the next, by half where steps are short. It ends with its thread.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def figures(artifact: Artifact, home: Home, settings: Settings, progress: Progress) -> dict[str, Callable[[], list[Table]]]:
    """The function that measures each figure of an artifact."""
    return {
        "load": lambda: [
            bench_load.load(
                artifact.path,
                prompt_tokens=settings.loads[0].prompt_tokens,
                rounds=settings.rounds,
                threads=torch.get_num_threads(),
                environment=home.environment,
                progress=progress,
            )
        ],
        "decode": lambda: step.decode(artifact, settings.repetitions, progress),
        "prefill": lambda: [
            step.prefill(artifact, settings.repetitions, progress),
            *step.prefill_together(artifact, settings.repetitions, progress),
        ],
        "streams": lambda: [bench_streams.streams(artifact, settings.loads, settings.rounds, progress)],
        "overhead": lambda: [bench_overhead.overhead(artifact, settings.rounds, progress)],
        "speculation": lambda: [speculation(artifact, home, settings, progress)],
        "peer": lambda: [peer.peer(artifact, settings.loads, settings.rounds, progress)],
        "peers": lambda: peers(artifact, home, settings, progress),
    }


def peers(artifact: Artifact, home: Home, settings: Settings, progress: Progress) -> list[Table]:
    """An artifact, with and without its drafts, beside other engines."""
    return bench_peers.peers(
        artifact,
        without_drafts(artifact, home, settings, progress) if artifact.manifest.limits.drafts else None,
        settings.peers,
        settings.loads,
        settings.rounds,
        threads=torch.get_num_threads(),
        cache=home.cache / "peers",
        environment=home.environment,
        progress=progress,
    )


def speculation(artifact: Artifact, home: Home, settings: Settings, progress: Progress) -> Table:
    """The gain from drafting, against the same artifact without drafts, which is built beside it.

    Raises:
        SpecError: the artifact does not draft, or there are no prompts for its model.
    """
    manifest = artifact.manifest
    if not manifest.limits.drafts:
        raise SpecError(f"{artifact.path} drafts nothing; legal is one built with --speculative-tokens of at least 1")
    model = registry.find(manifest.build_arguments[0], FamilyFile.recorded(manifest.model))
    path = settings.prompts or (model.checkpoint_dir / "prompts.txt" if model.checkpoint_dir else None)
    if path is None or not path.is_file():
        raise SpecError(f"no prompts for {model.name}: {path} is no file; legal is --prompts FILE, one prompt a line")
    if manifest.tokenizer is None:
        raise SpecError(f"{artifact.path} has no tokenizer; drafting is measured on text")
    texts = bench_speculation.read_prompts(path, TextTokenizer.load(artifact.path / manifest.tokenizer))
    plain = without_drafts(artifact, home, settings, progress)
    return bench_speculation.speculation(artifact, plain, texts, settings.loads, settings.rounds, progress)


def without_drafts(artifact: Artifact, home: Home, settings: Settings, progress: Progress) -> Artifact:
    """The same artifact without drafts, which is built beside it."""
    path = artifact.path.with_name(f"{artifact.path.name}-k0")
    progress.say(f"{path}: the same artifact without drafts, brought up to date")
    # The last of repeated options counts.
    arguments = (*artifact.manifest.build_arguments, "--speculative-tokens", "0")
    build.apart(path, home.cache, settings.jobs, arguments, home.environment)
    return Artifact.open(path)


def describe(artifact: Artifact) -> dict[str, str]:
    """A short description of an artifact."""
    manifest = artifact.manifest
    compiled = sum(entry.compiled is not None for entry in manifest.graphs)
    return {
        "model": str(manifest.model["name"]),
        "dtype": manifest.dtype,
        "weights": f"{sum(leaf.aval.nbytes for leaf in manifest.params) / 1e6:,.1f} MB",
        "context": str(manifest.limits.max_model_len),
        "buckets": f"{len(manifest.graphs)} ({compiled} compiled by {manifest.backend})",
        "artifact": artifact.digest[:12],
    }


def build_arguments(home: Home, name: str | None, family: str | None = None) -> tuple[str, ...]:
    """Arguments that built an artifact, or those of a default build of a model.

    Raises:
        ArtifactMissing: nothing is named and nothing is built.
        SpecError: the artifact does not record its arguments.
    """
    try:
        arguments = Artifact.open(artifact_path(home.artifacts, name), check=False).manifest.build_arguments
    except ArtifactMissing:
        if name is None:
            raise
        return (name, "--family", family) if family else (name,)
    if not arguments:
        raise SpecError(f"the artifact {name!r} does not say how it was built; name a model")
    return arguments


def find_or_build(home: Home, name: str | None, progress: Progress, family: str | None = None) -> Artifact:
    """The artifact to measure.

    Raises:
        ArtifactError: it cannot run here, or was built with another family.
        ModelError: the name is neither an artifact's nor a model's.
    """
    try:
        artifact = Artifact.open(artifact_path(home.artifacts, name))
    except ArtifactMissing:
        if name is None:
            raise
        plan = planning.plan(planning.Options(name, family=family))
        out = planning.default_out(home.artifacts, plan.source)
        artifact = Artifact.open(building.build(plan, out, home.cache, progress).path)
    artifact.check_runnable()
    if family is not None:
        check_family(artifact, family)
    return artifact
