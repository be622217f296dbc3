"""Compares an artifact with the engines that are installed beside it: finds them, converts the checkpoint, and measures all in turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ....graphs.errors import ModelError, SpecError
from ....lowering.artifact.artifact import Artifact
from ....lowering.artifact.manifest import Manifest
from ....models import registry, safetensors_files
from ....models.draft_source import open_both, recorded
from ....models.family_file import FamilyFile
from ...bench.machine import MEMORY_BUFFER_BYTES, cache_bytes, reader
from ...bench.report import Table, Value
from ...bench.step import needed_bytes
from ...bench.streams import Load
from ...progress import Progress
from . import engines
from .compare import SLOW_START_S, STARTS, Side, Started, short, start, start_row, tables, throughput
from .engines import Peer
from .process import NotInstalled, PeerError, PeerProcess

OURS = "npucompile"
PLAIN = "npucompile, no drafts"

Run = Callable[[Sequence[str], Mapping[str, str]], None]
"""Runs a command to its end; raises PeerError where it fails."""


@dataclass(frozen=True)
class Choice:
    """What is compared with.

    Attributes:
        peers: engines.
        pythons: interpreters by the name in `--peer-python`.
        llama_cpp: a checkout of llama.cpp, whose converter writes GGUF files.
    """

    peers: tuple[Peer, ...] = engines.named(())
    pythons: Mapping[str, str] = field(default_factory=dict)
    llama_cpp: Path | None = None


def choice(names: Sequence[str], pythons: Sequence[str], llama_cpp: Path | None) -> Choice:
    """Reads the options of the command.

    Raises:
        SpecError: on an unknown name, an interpreter that is not there, or a directory that is no checkout of llama.cpp.
    """
    if llama_cpp is not None and not (llama_cpp / engines.CONVERTER).is_file():
        raise SpecError(f"--llama-cpp {llama_cpp} has no {engines.CONVERTER}; legal is a checkout of llama.cpp")
    return Choice(engines.named(names), engines.interpreters(pythons), llama_cpp)


def our_side(name: str, artifact: Artifact, threads: int, environment: Mapping[str, str]) -> Side:
    """An artifact, served through the engine in a process like those of the others."""
    command = [sys.executable, "-m", f"{__package__}.ours"]
    variables = {**environment, "OMP_NUM_THREADS": str(threads)}
    return Side(name, partial(PeerProcess, command, variables), str(artifact.path))


def peer_side(
    peer: Peer,
    chosen: Choice,
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
    python = find(peer, chosen.pythons, variables)
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


def find(peer: Peer, pythons: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """The interpreter that has an engine.

    Raises:
        PeerError: none has it; says what to install.
    """
    missing = []
    for python in engines.candidates(peer, pythons, variables.get("PATH")):
        try:
            with PeerProcess(peer.command(python), variables):
                return python
        except NotInstalled as error:
            missing.append(str(error))
    advice = f"install it ({peer.install}), or name an interpreter that has it with --peer-python {peer.environment_name}=PATH"
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


def decode_step_bytes(manifest: Manifest, load: Load) -> int | None:
    """Bytes that a decode step of one request must read in the middle of a load; None without such a bucket."""
    entry = next((entry for entry in manifest.graphs if entry.bucket.kind == "decode" and entry.bucket.batch == 1), None)
    return None if entry is None else needed_bytes(manifest, entry, load.prompt_tokens + load.tokens // 2)


def peers(
    artifact: Artifact,
    plain: Artifact | None,
    chosen: Choice,
    loads: Sequence[Load],
    rounds: int,
    *,
    threads: int,
    cache: Path,
    environment: Mapping[str, str],
    progress: Progress,
    memory_buffer_bytes: int | None = None,
) -> list[Table]:
    """Measures prefill, decode, start and memory of an artifact and of its peers.

    Args:
        plain: the same without drafts, where the artifact drafts.
        threads: of every side.
        cache: directory of converted checkpoints.
        memory_buffer_bytes: of the buffer whose read is the bandwidth; None is four times the last-level cache, and at least 512 MiB.

    Raises:
        SpecError: a load does not fit the context.
        ModelError: the checkpoint is missing or has changed.
    """
    manifest = artifact.manifest
    for load in loads:
        load.check(manifest.limits.max_model_len)
    checkpoint = checkpoint_dir(manifest)
    sides = [our_side(OURS, artifact, threads, environment)]
    sides += [our_side(PLAIN, plain, threads, environment)] if plain else []
    refused: dict[str, str] = {}
    for peer in chosen.peers:
        try:
            sides.append(peer_side(peer, chosen, checkpoint, manifest, threads, cache, environment, progress))
        except PeerError as error:
            refused[peer.name] = str(error)
    vocab = int(manifest.model["vocab_size"])
    with ExitStack() as stack:
        started = start_all(sides, manifest.dtype, threads, loads, vocab, rounds, refused, progress, stack)
        step_bytes = _step_bytes(artifact, plain, started, loads[0])
        size = memory_buffer_bytes or max(MEMORY_BUFFER_BYTES, 4 * cache_bytes())
        memory = reader(size, 0, time.perf_counter, memory_buffer_bytes=size)
        rows, notes, bandwidths = [], [], []
        with progress.bar("peers", len(loads)) as bar:
            for load in loads:
                processes = {name: starts[-1].process for name, starts in started.items()}
                lines, failed, bytes_per_s = throughput(load, processes, memory, rounds, vocab, step_bytes)
                rows += lines
                notes += failed
                bandwidths += bytes_per_s
                bar.step(f"{load.streams} streams: {short(lines)}")
        by_name = {side.name: side for side in sides}
        start_rows: list[dict[str, Value]] = [
            start_row(by_name[name], starts, starts[-1].process.resident_bytes()) for name, starts in started.items()
        ]
    start_rows += [{"side": name, "remark": why} for name, why in refused.items()]
    return tables(rows, start_rows, [*_notes(manifest, loads, rounds, threads, bandwidths), *notes], _start_notes(rounds))


def start_all(
    sides: Sequence[Side],
    dtype: str,
    threads: int,
    loads: Sequence[Load],
    vocab: int,
    rounds: int,
    refused: dict[str, str],
    progress: Progress,
    stack: ExitStack,
) -> dict[str, list[Started]]:
    """Starts all sides in turns, the last time to stay. One whose first start is slow is started once more only.

    Args:
        refused: takes the reason of a side that does not start.
        stack: closes those that stay.

    Raises:
        PeerError: it is the first side, which is ours.
    """
    counted = min(rounds, STARTS)
    room = Load(max(load.streams for load in loads), loads[0].prompt_tokens, loads[0].tokens)
    prompt = loads[0].prompts(vocab)[0]
    started: dict[str, list[Started]] = {side.name: [] for side in sides}
    slow: set[str] = set()
    with progress.bar("start", (1 + counted) * len(sides)) as bar:
        for i in range(1 + counted):
            for side in sides if i % 2 == 0 else list(reversed(sides)):
                if side.name in refused or (side.name in slow and i < counted):
                    continue
                try:
                    new = start(side, dtype, threads, room, prompt)
                except PeerError as error:
                    if side is sides[0]:
                        raise
                    refused[side.name] = str(error)
                    del started[side.name]
                    continue
                if i < counted:
                    new.process.close()
                else:
                    stack.callback(new.process.close)
                    new.process.ask("settle")
                # The first fills the page cache.
                started[side.name] += [new] if i else []
                slow |= {side.name} if new.process_s > SLOW_START_S else set()
                bar.step(f"{side.name}: {new.load_s:.1f} s to the first token")
    return started


def _step_bytes(artifact: Artifact, plain: Artifact | None, names: Iterable[str], load: Load) -> dict[str, int]:
    """Bytes of a decode step by side: peers decode one token a step, as the artifact without drafts does."""
    sizes: dict[str, int | None] = dict.fromkeys(names, decode_step_bytes((plain or artifact).manifest, load))
    sizes[OURS] = decode_step_bytes(artifact.manifest, load)
    return {name: size for name, size in sizes.items() if size is not None}


def _notes(manifest: Manifest, loads: Sequence[Load], rounds: int, threads: int, bandwidths: Sequence[float]) -> list[str]:
    low, high = min(bandwidths) / 1e9, max(bandwidths) / 1e9
    return [
        f"{loads[0].prompt_tokens} prompt tokens and {loads[0].tokens} generated, each stream; the same token ids for all, greedy, end of "
        f"text ignored; {manifest.dtype}, {threads} threads; medians (smallest..largest) of {rounds} rounds, in turns, each in a process "
        "that is stopped while another is measured",
        "prefill: prompt tokens over the time until every stream has its first token; decode: tokens after that over the rest of the time",
        "share of bandwidth: bytes that the decode steps of one stream must read, by the cost report, over those that memory read in the "
        f"same round ({low:.1f}..{high:.1f} GB/s)",
        "first / this: the first engine of the table over that of the row; equal first tokens: with the first engine; bfloat16 does not "
        "round equally everywhere",
    ]


def _start_notes(rounds: int) -> list[str]:
    return [
        f"medians (smallest..largest) of {min(rounds, STARTS)} starts, in turns, after one that does not count, and of one where that took "
        f"over {SLOW_START_S} s; the files are in the page cache",
        "start: a new process, with its imports; load: from the request to load, imports excluded; RSS: at the end, mapped files included",
    ]
