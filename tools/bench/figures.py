"""The figures of `npucompile bench`: what is measured, of which artifact, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ...graphs.errors import ArtifactMissing, SpecError
from ...lowering.artifact.artifact import Artifact
from ..builder import driver as building
from ..builder import plan as planning
from ..cli import Home
from ..laboratory import laboratory
from ..locate import artifact_path, check_family
from ..progress import Progress
from . import build, step
from . import load as bench_load
from . import streams as bench_streams
from .report import ReportTable
from .streams import StreamLoad

T = TypeVar("T")

OF_THE_LABORATORY = ("speculation", "peers")
"""Figures that tools/lab measures."""
SLOW = ("build", *OF_THE_LABORATORY)
"""Figures that are measured only if `--only` names them."""
FIGURES = ("build", "load", "decode", "prefill", "streams", *OF_THE_LABORATORY)


@dataclass(frozen=True)
class BenchSettings:
    """How much is measured.

    Attributes:
        loads: request loads of streams, speculation and peers.
        repetitions: of a step.
        rounds: of load, streams, speculation and peers.
        builds: rounds of builds.
        jobs: graphs compiled at a time.
        prompts: file of prompts for speculation; None means the model's own.
        peers: names of the engines of peers.
        peer_pythons: their interpreters, as NAME=PATH.
        llama_cpp: a checkout of llama.cpp, whose converter writes GGUF files.
    """

    loads: tuple[StreamLoad, ...]
    repetitions: int
    rounds: int
    builds: int
    jobs: int
    prompts: Path | None = None
    peers: tuple[str, ...] = ()
    peer_pythons: tuple[str, ...] = ()
    llama_cpp: Path | None = None


def measure(
    home: Home, name: str | None, only: tuple[str, ...] | None, settings: BenchSettings, progress: Progress, family: str | None = None
) -> tuple[dict[str, str], Iterator[ReportTable]]:
    """A description of what is measured, and the tables, each yielded as soon as it is measured.

    Raises:
        NpucompileError: the named artifact or model cannot be measured.
    """
    wanted = only or tuple(figure for figure in FIGURES if figure not in SLOW)
    of_lab = [figure for figure in wanted if figure in OF_THE_LABORATORY]
    lab = laboratory("figures", f"bench --only {of_lab[0]}") if of_lab else None
    if lab is not None:
        lab.check(settings)
    subject: dict[str, str] = {}
    sources: dict[str, Callable[[], list[ReportTable]]] = {}
    if set(wanted) - {"build"}:
        artifact = _alone(lambda: find_or_build(home, name, progress, family))
        if {"load", "streams", *OF_THE_LABORATORY} & set(wanted):
            for load in settings.loads:
                load.check(artifact.manifest.limits.max_model_len)
        subject = describe(artifact)
        sources = figures(artifact, home, settings, progress)
        if lab is not None:
            sources |= lab.figures(artifact, home.cache, home.environment, settings, progress)
    if "build" in wanted:
        arguments = build_arguments(home, name, family)
        subject["npucompile build"] = " ".join(arguments)
        sources["build"] = lambda: [
            build.build(arguments, jobs=settings.jobs, rounds=settings.builds, environment=home.environment, progress=progress)
        ]
    return subject, (table for figure in wanted for table in _alone(sources[figure]))


def _alone(work: Callable[[], T]) -> T:
    """Runs `work` in a thread of its own.

    OpenMP keeps a worker pool for every thread that ran tensor operators. With more workers than cores they sleep between operators, so
    the pool of one figure would slow down the next, by half where steps are short. It ends with its thread.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def figures(artifact: Artifact, home: Home, settings: BenchSettings, progress: Progress) -> dict[str, Callable[[], list[ReportTable]]]:
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
        "prefill": lambda: [step.prefill(artifact, settings.repetitions, progress)],
        "streams": lambda: [bench_streams.streams(artifact, settings.loads, settings.rounds, progress)],
    }


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
