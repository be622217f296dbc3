"""Turns an artifact into a running service, while a build in a process of its own goes on adding executables to it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...graphs.errors import ArtifactError, NpucompileError
from ...lowering.artifact.artifact import MANIFEST, Artifact, stamp
from ...runtime.cpu_executor import Executor
from ...runtime.distributed.sharded_executor import ShardedExecutor
from ...runtime.engine import Engine
from ...server.service import ServedModel, Service
from ...server.tokenizer import TextTokenizer
from .launch import Team

POLL_S = 0.1
PATIENCE = 10
"""Niceness of compilers that run beside a server."""


@dataclass(frozen=True)
class Running:
    """A service and what it runs on."""

    service: Service
    engine: Engine
    executor: Executor | ShardedExecutor


def start(artifact: Artifact, team: Team | None = None) -> Running:
    """Loads an artifact and starts its engine; from here on this process traces and compiles nothing.

    Args:
        team: the other ranks, for an artifact of several.

    Raises:
        ArtifactError: it cannot run here.
        RankError: another rank cannot run it.
    """
    manifest = artifact.manifest
    if manifest.tokenizer is None:
        raise ArtifactError(f"{artifact.path} has no tokenizer; serving text needs a checkpoint directory with tokenizer.json")
    codec = TextTokenizer.load(artifact.path / manifest.tokenizer)
    loaded: list[Executor | ShardedExecutor] = []

    def load() -> Executor | ShardedExecutor:
        loaded.append(team.executor() if team else Executor(artifact))
        return loaded[0]

    engine = Engine.launch(load)
    (executor,) = loaded
    model = ServedModel(
        name=str(manifest.model["name"]),
        max_model_len=manifest.limits.max_model_len,
        vocab_size=int(manifest.model["vocab_size"]),
        eos_token_ids=frozenset(manifest.model["eos_ids"]),
        created_s=int((artifact.path / MANIFEST).stat().st_mtime),
        artifact=artifact.digest,
    )

    def readiness() -> Mapping[str, Any]:
        compiled = sum(name != "eager" for name in executor.backends.values())
        return {"status": "ok", "buckets": len(executor.backends), "compiled_buckets": compiled}

    return Running(Service(engine, codec, model, readiness=readiness), engine, executor)


class Builder:
    """`npucompile build`, one graph at a time and patiently, in a process of its own.

    Args:
        arguments: of the build command, but for those that say where and how.
        out: the artifact's directory.
        environment: of that process.
    """

    def __init__(self, arguments: Sequence[str], out: Path, environment: Mapping[str, str]) -> None:
        self.out, self._before = out, stamp(out)
        command = [sys.executable, "-m", "npucompile.tools.cli", "build", *arguments]
        command += ["--out", str(out), "--jobs", "1", "--patience", str(PATIENCE)]
        self.process = subprocess.Popen(command, env=dict(environment), stdout=subprocess.DEVNULL)

    def wait_servable(self) -> Artifact:
        """The artifact, as soon as the build has published it; one that was there before does not count.

        Raises:
            NpucompileError: the build ended without one; what it said is on standard error.
        """
        while True:
            ended = self.process.poll()
            if stamp(self.out) not in (None, self._before):
                return Artifact.open(self.out)
            if ended is not None:
                raise NpucompileError(f"the build ended with status {ended} before there was anything to serve; it said why above")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ends the build if it is still running; what it finished stays, and the next one goes on from there."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


def incomplete(artifact: Artifact) -> bool:
    """Whether buckets of an artifact still wait for their executables."""
    manifest = artifact.manifest
    return manifest.target not in ("eager", "null") and any(entry.compiled is None for entry in manifest.graphs)
