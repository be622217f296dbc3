"""Measures how long a fresh process takes to its first token: import, open, load, prefill."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ...graphs.errors import NpucompileError
from ...lowering.artifact.artifact import Artifact
from ...runtime.cpu_executor import CpuExecutor
from ...runtime.engine import Engine
from ...runtime.request import Event, Request, TokenEvent
from ..progress import Progress
from .report import Column, ReportTable, Value
from .stats import Clock, spread

STAGES = {
    "import": "start Python, import torch and the runtime",
    "open": "open the artifact: manifest, digests of files that changed since they were checked",
    "weights": "load the weights",
    "executables": "load the executables, allocate the state: ready",
    "first_token": "first token",
    "to_first_token": "open to first token",
    "process_to_first_token": "start of Python to first token",
    "second_request": "first token of a second, equal request",
}
"""Stages of a process by the key of their times; `to_first_token` is the sum of those after the import, `process_to_first_token` of all."""

COLUMNS = (Column("stage", "stage"), Column("ms", "ms", 1))

Launch = Callable[[Sequence[str]], str]
"""Runs `python -m` with arguments; returns its standard output."""


class _TimedArtifact(Artifact):
    """An artifact that records how long loading its weights takes."""

    clock: Clock = time.monotonic
    weights_s = 0.0

    def load_weights(self) -> dict[str, torch.Tensor]:
        began = self.clock()
        try:
            return super().load_weights()
        finally:
            self.weights_s = self.clock() - began


def probe(path: Path, prompt_tokens: int, clock: Clock = time.monotonic) -> dict[str, float]:
    """Opens an artifact and serves one token, twice; returns milliseconds by stage, except for the import.

    Raises:
        ArtifactError: the artifact cannot be served.
    """
    began = clock()
    opened = Artifact.open(path)
    opened.check_runnable()
    after_open = clock()
    artifact = _TimedArtifact(opened.path, opened.manifest, opened.digest)
    artifact.clock = clock
    executor = CpuExecutor(artifact)
    ready = clock()
    engine = Engine(executor, refresh_every_s=None)
    prompt = tuple(1 + i % (executor.vocab_size - 1) for i in range(prompt_tokens))
    first = _first_token(engine, Request("first", prompt, 1), clock)
    second = _first_token(engine, Request("second", prompt, 1), clock)
    times = {
        "open": after_open - began,
        "weights": artifact.weights_s,
        "executables": ready - after_open - artifact.weights_s,
        "first_token": first,
        "to_first_token": ready - began + first,
        "second_request": second,
    }
    return {name: 1e3 * seconds for name, seconds in times.items()}


def _first_token(engine: Engine, request: Request, clock: Clock) -> float:
    arrived: list[float] = []
    ended: list[Event] = []

    def sink(event: Event) -> None:
        (arrived if isinstance(event, TokenEvent) else ended).append(clock())  # type: ignore[arg-type]

    began = clock()
    engine.submit(request, sink)
    while not ended:
        engine.step()
    if not arrived:
        raise NpucompileError(f"the request {request.id!r} ended without a token")
    return arrived[0] - began


def load(
    path: Path,
    *,
    prompt_tokens: int,
    rounds: int,
    threads: int,
    environment: Mapping[str, str],
    progress: Progress,
    launch: Launch | None = None,
    clock: Clock = time.monotonic,
) -> ReportTable:
    """Times `rounds` fresh processes one after the other, after an uncounted one that fills the page cache.

    Args:
        threads: CPU threads of a step.
        launch: replaces the start of processes in tests.

    Raises:
        NpucompileError: a process failed; with its output.
    """
    launch = launch or (lambda arguments: _launch(arguments, environment))
    samples: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with progress.bar("load", rounds + 1) as bar:
        for i in range(rounds + 1):
            began = clock()
            report: dict[str, float] = json.loads(launch([str(path), str(prompt_tokens), str(threads)]))
            # The monotonic clock is the same in all processes, so a child's reading after its imports can be compared with ours.
            imported_ms = 1e3 * (report.pop("imported_s") - began)
            times = {"import": imported_ms, "process_to_first_token": imported_ms + report["to_first_token"], **report}
            for stage in STAGES:
                samples[stage] += [times[stage]] if i else []
            bar.step(f"{times['to_first_token']:.1f} ms to the first token")
    rows: list[dict[str, Value]] = [{"stage": text, "ms": spread(samples[stage])} for stage, text in STAGES.items()]
    notes = (
        f"medians (smallest..largest) of {rounds} fresh processes; the files are in the page cache; prompt of {prompt_tokens} tokens",
        "the import is shown apart: it is Python's and torch's, the same for every artifact",
    )
    return ReportTable("load", "Artifact load to first token", COLUMNS, tuple(rows), notes)


def _launch(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", __name__, *arguments]
    run = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if run.returncode:
        error = run.stderr.strip()[-2000:]
        raise NpucompileError(f"the process that loads {arguments[0]} ended with status {run.returncode}: {error}")
    return run.stdout


def main(arguments: Sequence[str]) -> None:
    """Entry point of a fresh process: PATH PROMPT_TOKENS THREADS; prints the times as JSON."""
    gc.freeze()  # as a server does (tools/serve/serving.py)
    imported_s = time.monotonic()
    path, prompt_tokens, threads = arguments
    torch.set_num_threads(int(threads))
    print(json.dumps({"imported_s": imported_s, **probe(Path(path), int(prompt_tokens))}))


if __name__ == "__main__":
    main(sys.argv[1:])
