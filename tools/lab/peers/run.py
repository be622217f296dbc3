"""Compares an artifact with the engines that are installed beside it: finds them, converts the checkpoint, and measures all in turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ....graphs.errors import ModelError, SpecError
from ....lowering.artifact.artifact import Artifact
from ....lowering.artifact.manifest import Manifest
from ....models import registry, safetensors_files
from ....models.draft_source import open_both, recorded
from ....models.family_file import FamilyFile
from ...bench.report import ReportTable
from ...bench.streams import StreamLoad
from ...progress import Progress
from . import engines
from .compare import Side, compare
from .engines import EnginePeer
from .process import NotInstalled, PeerError, PeerProcess

OURS = "npucompile"

Run = Callable[[Sequence[str], Mapping[str, str]], None]
"""Runs a command to its end; raises PeerError where it fails."""


@dataclass(frozen=True)
class PeerChoice:
    """What is compared with.

    Attributes:
        peers: engines.
        pythons: interpreters by the name in `--peer-python`.
        llama_cpp: a checkout of llama.cpp, whose converter writes GGUF files.
    """

    peers: tuple[EnginePeer, ...] = engines.named(())
    pythons: Mapping[str, str] = field(default_factory=dict)
    llama_cpp: Path | None = None


def choice(names: Sequence[str], pythons: Sequence[str], llama_cpp: Path | None) -> PeerChoice:
    """Reads the options of the command.

    Raises:
        SpecError: on an unknown name, an interpreter that is not there, or a directory that is no checkout of llama.cpp.
    """
    if llama_cpp is not None and not (llama_cpp / engines.CONVERTER).is_file():
        raise SpecError(f"--llama-cpp {llama_cpp} has no {engines.CONVERTER}; legal is a checkout of llama.cpp")
    return PeerChoice(engines.named(names), engines.interpreters(pythons), llama_cpp)


def our_side(name: str, artifact: Artifact, threads: int, environment: Mapping[str, str]) -> Side:
    """An artifact, served through the engine in a process like those of the others."""
    command = [sys.executable, "-m", f"{__package__}.ours"]
    variables = {**environment, "OMP_NUM_THREADS": str(threads)}
    return Side(name, partial(PeerProcess, command, variables), str(artifact.path))


def peer_side(
    peer: EnginePeer,
    chosen: PeerChoice,
    checkpoint: Path,
    manifest: Manifest,
    threads: int,
    cache: Path,
    environment: Mapping[str, str],
    progress: Progress,
    run: Run | None = None,
) -> Side:
    """A peer that is installed, with the checkpoint in its format.

    Args:
        cache: directory of converted checkpoints.
        run: replaces the converter in tests.

    Raises:
        PeerError: it is not installed, or cannot be given this checkpoint.
    """
    variables = peer.environment(environment, threads)
    python = find(peer, chosen.pythons, variables, cache)
    try:
        kind = peer.format_of(manifest.dtype)
        if kind is None:
            model, remark = checkpoint, manifest.dtype
        else:
            digest = manifest.source_digest.rpartition(":")[2]
            model, remark = cache / f"{digest[:32]}-{peer.environment_name}-{kind}", f"{kind} weights"
            if not model.exists():
                progress.say(f"{peer.name}: converting {checkpoint} to {kind}, once")
                convert(partial(engines.conversion, peer, python, checkpoint, kind=kind, llama_cpp=chosen.llama_cpp), model, variables, run)
    except SpecError as error:
        raise PeerError(str(error)) from None
    return Side(peer.name, partial(PeerProcess, peer.command(python), variables), str(model), remark)


def find(peer: EnginePeer, pythons: Mapping[str, str], variables: Mapping[str, str], cache: Path) -> str:
    """The interpreter that has an engine.

    Args:
        cache: where environments of engines may be, by name.

    Raises:
        PeerError: none has it; says what to install.
    """
    missing = []
    for python in engines.candidates(peer, pythons, variables.get("PATH"), cache):
        try:
            with PeerProcess(peer.command(python), variables):
                return python
        except NotInstalled as error:
            missing.append(str(error))
    advice = (
        f"install it ({peer.install}) in a virtual environment {cache / peer.environment_name}, or name an interpreter that has it with "
        f"--peer-python {peer.environment_name}=PATH"
    )
    raise PeerError(f"not installed: {'; '.join(missing) or 'no interpreter was found'}; {advice}")


def convert(command: Callable[[Path], list[str]], model: Path, variables: Mapping[str, str], run: Run | None = None) -> None:
    """Writes a converted checkpoint, which appears at once or not at all.

    Raises:
        PeerError: the converter refuses the checkpoint; with what it said.
    """
    model.parent.mkdir(parents=True, exist_ok=True)
    part = model.with_name(f".{model.name}.part")
    _remove(part)
    try:
        (run or _run)(command(part), variables)
        if not part.exists():
            raise PeerError(f"its converter wrote nothing at {part}")
        os.replace(part, model)
    finally:
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(command: Sequence[str], variables: Mapping[str, str]) -> None:
    process = subprocess.run(command, env=dict(variables), capture_output=True, text=True, check=False)
    if process.returncode:
        said = [line for line in process.stderr.strip().splitlines() if line.strip()][-1:] or ["nothing on standard error"]
        raise PeerError(f"its converter ended with status {process.returncode}: {said[0][-600:]}")


def checkpoint_dir(manifest: Manifest) -> Path:
    """The checkpoint directory that an artifact was built from.

    Raises:
        ModelError: it is missing or has changed.
    """
    for name in (*manifest.build_arguments[:1], str(manifest.model["name"])):
        try:
            directory = registry.find(name, FamilyFile.recorded(manifest.model)).checkpoint_dir
        except ModelError:
            continue
        if directory is None:
            continue
        digest = safetensors_files.digest(open_both(directory, recorded(manifest.model)))
        if digest != manifest.source_digest:
            raise ModelError(f"{directory} has digest {digest}; the artifact was built from {manifest.source_digest}; build it again")
        return directory
    named = " or ".join(manifest.build_arguments[:1]) or "no path"
    raise ModelError(f"the artifact was built from {manifest.model['name']!r} at {named}, and no checkpoint is there to compare with")


def peers(
    artifact: Artifact,
    chosen: PeerChoice,
    loads: Sequence[StreamLoad],
    rounds: int,
    *,
    threads: int,
    cache: Path,
    environment: Mapping[str, str],
    progress: Progress,
) -> list[ReportTable]:
    """Measures prefill, decode and start of an artifact and of its peers; the largest load with a mixture of prompts, too, if it fits.

    Args:
        threads: of every side.
        cache: directory of converted checkpoints.

    Raises:
        SpecError: a load does not fit the context.
        ModelError: the checkpoint is missing or has changed.
    """
    manifest = artifact.manifest
    for load in loads:
        load.check(manifest.limits.max_model_len)
    mixed = replace(max(loads, key=lambda load: load.streams), mixed=True)
    if mixed.streams > 1 and max(mixed.lengths) + mixed.tokens <= manifest.limits.max_model_len:
        loads = (*loads, mixed)
    checkpoint = checkpoint_dir(manifest)
    sides = [our_side(OURS, artifact, threads, environment)]
    refused: dict[str, str] = {}
    for peer in chosen.peers:
        try:
            sides.append(peer_side(peer, chosen, checkpoint, manifest, threads, cache, environment, progress))
        except PeerError as error:
            refused[peer.name] = str(error)
    return compare(sides, refused, manifest.dtype, threads, loads, int(manifest.model["vocab_size"]), rounds, progress)
