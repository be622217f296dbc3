"""The figures of `npucompile bench` that only the laboratory measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact
from ...models import registry
from ...models.family_file import FamilyFile
from ...server.text.tokenizer import TextTokenizer
from ..bench import build
from ..bench.figures import BenchSettings
from ..bench.report import ReportTable
from ..builder.settings.model import DRAFT_WIDTHS
from ..progress import Progress
from . import speculation as bench_speculation
from .peers import run as bench_peers


def check(settings: BenchSettings) -> None:
    """Refuses engines that are unknown, and interpreters and checkouts that are not there.

    Raises:
        SpecError: naming the option.
    """
    chosen(settings)


def chosen(settings: BenchSettings) -> bench_peers.PeerChoice:
    """The engines that the settings name."""
    return bench_peers.choice(settings.peers, settings.peer_pythons, settings.llama_cpp)


def figures(
    artifact: Artifact, cache: Path, environment: Mapping[str, str], settings: BenchSettings, progress: Progress
) -> dict[str, Callable[[], list[ReportTable]]]:
    """The function that measures each figure of an artifact."""
    return {
        "speculation": lambda: [speculation(artifact, cache, environment, settings, progress)],
        "peers": lambda: peers(artifact, cache, environment, settings, progress),
    }


def peers(
    artifact: Artifact, cache: Path, environment: Mapping[str, str], settings: BenchSettings, progress: Progress
) -> list[ReportTable]:
    """An artifact beside other engines."""
    return bench_peers.peers(
        artifact,
        chosen(settings),
        settings.loads,
        settings.rounds,
        threads=torch.get_num_threads(),
        cache=cache / "peers",
        environment=environment,
        progress=progress,
    )


def speculation(
    artifact: Artifact, cache: Path, environment: Mapping[str, str], settings: BenchSettings, progress: Progress
) -> ReportTable:
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
    # The same artifact without drafts, which is built beside it; the last of repeated options counts.
    path = artifact.path.with_name(f"{artifact.path.name}-k0")
    progress.say(f"{path}: the same artifact without drafts, brought up to date")
    words = (*manifest.build_arguments, "--speculative-tokens", "0", f"--{DRAFT_WIDTHS.option}", "1")
    build.apart(path, cache, settings.jobs, words, environment)
    return bench_speculation.speculation(artifact, Artifact.open(path), texts, settings.loads, settings.rounds, progress)
