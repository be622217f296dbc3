"""Turns an artifact into tokens a second under many streams, through the engine alone and through the websocket server."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from ...graphs.errors import NpucompileError, SpecError
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.executable import Executable
from ...runtime.cpu_executor import CpuExecutor
from ...runtime.engine import Engine
from ...runtime.executor import Executor
from ...runtime.request import Event, ExecutionRecord, FinishEvent, Request, TokenEvent
from ...server.client import Client, raise_if_refused
from ...server.run import serving
from ..progress import Progress
from ..serve import serving as services
from . import acceptance
from .report import Column, Table, Value
from .stats import Clock, interleave, spread

COLUMNS = (
    Column("streams", "streams", 0),
    Column("path", "through"),
    Column("tokens_per_s", "tok/s", 1),
    Column("first_token_ms", "first token ms", 1),
    Column("between_tokens_ms", "between tokens ms"),
    Column("step_ms", "decode step ms", 3),
    Column("executable_ms", "of it executable ms", 3),
    Column("host_ms", "of it host ms", 3),
    Column("acceptance_length", "tokens a step"),
)


@dataclass(frozen=True)
class Load:
    """Requests that start together, each greedy and to the full length.

    Attributes:
        streams: how many.
        prompt_tokens: of each; the ids are random, and the same for the same load.
        tokens: to generate, of each.
    """

    streams: int
    prompt_tokens: int
    tokens: int

    def prompts(self, vocab: int) -> list[list[int]]:
        """Token ids [streams][prompt_tokens]."""
        draw = random.Random(self.prompt_tokens)
        return [[draw.randrange(vocab) for _ in range(self.prompt_tokens)] for _ in range(self.streams)]

    def check(self, max_model_len: int) -> None:
        """Refuses a load that does not fit the context.

        Raises:
            SpecError: naming both lengths.
        """
        if self.tokens < 2 or self.prompt_tokens < 1 or self.prompt_tokens + self.tokens > max_model_len:
            raise SpecError(
                f"{self.prompt_tokens} prompt tokens and {self.tokens} to generate; legal are at least 1 and 2, "
                f"and together at most the artifact's context of {max_model_len}"
            )


@dataclass(frozen=True)
class Run:
    """One load, served.

    Attributes:
        seconds: from the first submission to the last token.
        token_ids: what each stream was told.
        arrivals: for each stream, (seconds since it was submitted, tokens that arrived then).
        steps: (whole step, inside the executable) seconds of every decode step; empty where that cannot be seen.
        records: execution record of each stream; empty where they cannot be seen.
    """

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    arrivals: tuple[tuple[tuple[float, int], ...], ...]
    steps: tuple[tuple[float, float], ...] = ()
    records: tuple[ExecutionRecord, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all streams over the whole time, prefill included."""
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def first_ms(self) -> float:
        """Median over streams of the time to the first token."""
        return 1e3 * statistics.median(stream[0][0] for stream in self.arrivals)

    @property
    def between_ms(self) -> float | None:
        """Median time between two tokens of a stream; tokens that arrive together share the time since the last.

        None where every stream's tokens arrived at once.
        """
        gaps = []
        for stream in self.arrivals:
            for (before, _), (now, count) in itertools.pairwise(stream):
                gaps += [(now - before) / count] * count
        return 1e3 * statistics.median(gaps) if gaps else None


class TimedExecutor(CpuExecutor):
    """An executor that notes how long its executables run, to tell them from the host's work around them.

    Attributes:
        calls: (bucket kind, seconds) of every step since it was loaded.
    """

    def __init__(self, artifact: Artifact, *, clock: Clock = time.perf_counter) -> None:
        self.calls: list[tuple[str, float]] = []
        self._clock = clock
        super().__init__(artifact)

    def _open(self, entry: GraphEntry) -> Executable:
        return _Timed(super()._open(entry), entry.bucket.kind, self.calls, self._clock)


class _Timed:
    """One executable whose calls are noted."""

    def __init__(self, inner: Executable, kind: str, calls: list[tuple[str, float]], clock: Clock) -> None:
        self._inner, self._kind, self._calls, self._clock = inner, kind, calls, clock
        self.backend = inner.backend

    def __call__(self, operands: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Runs one step."""
        began = self._clock()
        results = self._inner(operands)
        self._calls.append((self._kind, self._clock() - began))
        return results


def through_engine(executor: Executor, calls: Sequence[tuple[str, float]], load: Load, clock: Clock = time.perf_counter) -> Run:
    """Serves a load with an engine of its own, stepped by this thread.

    Args:
        calls: grows by one (bucket kind, seconds) with every step that `executor` runs.

    Raises:
        NpucompileError: a request failed.
    """
    engine = Engine(executor, refresh_every_s=None)
    sinks = [_Sink(clock) for _ in range(load.streams)]
    began = clock()
    for i, (prompt, sink) in enumerate(zip(load.prompts(executor.vocab_size), sinks, strict=True)):
        sink.submitted_s = clock()
        engine.submit(Request(str(i), tuple(prompt), load.tokens), sink)
    steps = []
    while not all(sink.end for sink in sinks):
        before, started = len(calls), clock()
        engine.step()
        taken = clock() - started
        steps += [(taken, seconds) for kind, seconds in calls[before:] if kind == "decode"]
    seconds = clock() - began
    records = tuple(sink.end.record for sink in sinks if sink.end)
    return Run(seconds, tuple(sink.result() for sink in sinks), tuple(tuple(sink.arrivals) for sink in sinks), tuple(steps), records)


class _Sink:
    """Notes when the tokens of one request arrive."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens: list[int] = []
        self.submitted_s = 0.0
        self.arrivals: list[tuple[float, int]] = []
        self.end: FinishEvent | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.arrivals.append((self._clock() - self.submitted_s, len(event.token_ids)))
            self._tokens += event.token_ids
        else:
            self.end = event

    def result(self) -> tuple[int, ...]:
        if self.end is None or self.end.reason != "length":
            raise NpucompileError(f"a stream ended with {self.end!r}; a benchmark's end with reason length")
        return tuple(self._tokens)


async def through_socket(url: str, load: Load, vocab: int, clock: Clock = time.perf_counter) -> Run:
    """Serves a load over one websocket, all streams multiplexed on it.

    Raises:
        RequestError: the server refused or failed a request.
    """

    async def follow(client: Client, prompt: list[int]) -> tuple[tuple[int, ...], tuple[tuple[float, int], ...]]:
        ids: list[int] = []
        arrivals: list[tuple[float, int]] = []
        began = clock()
        async for event in client.create(prompt, max_output_tokens=load.tokens, temperature=0.0, ignore_eos=True):
            # The last delta of a text may bring text alone, held back until then.
            if raise_if_refused(event)["type"] == "response.output_text.delta" and event["token_ids"]:
                arrivals.append((clock() - began, len(event["token_ids"])))
                ids += event["token_ids"]
        return tuple(ids), tuple(arrivals)

    async with await Client.connect(url) as client:
        began = clock()
        found = await asyncio.gather(*(follow(client, prompt) for prompt in load.prompts(vocab)))
        seconds = clock() - began
    if any(len(ids) != load.tokens for ids, _ in found):
        raise NpucompileError(f"streams brought {[len(ids) for ids, _ in found]} tokens; each was asked for {load.tokens}")
    return Run(seconds, tuple(ids for ids, _ in found), tuple(arrivals for _, arrivals in found))


def _socket_round(url: str, load: Load, vocab: int) -> Run:
    return asyncio.run(through_socket(url, load, vocab))


def row(load: Load, path: str, runs: Sequence[Run]) -> dict[str, Value]:
    """The rounds of one load on one path."""
    found: dict[str, Value] = {
        "streams": load.streams,
        "path": path,
        "tokens_per_s": spread(run.tokens_per_s for run in runs),
        "first_token_ms": spread(run.first_ms for run in runs),
    }
    gaps = [run.between_ms for run in runs if run.between_ms is not None]
    if gaps:
        found["between_tokens_ms"] = spread(gaps)
    if all(run.steps for run in runs):
        found["step_ms"] = spread(1e3 * statistics.median(step for step, _ in run.steps) for run in runs)
        found["executable_ms"] = spread(1e3 * statistics.median(inner for _, inner in run.steps) for run in runs)
        found["host_ms"] = spread(1e3 * statistics.median(step - inner for step, inner in run.steps) for run in runs)
    found["acceptance_length"] = acceptance.length([record for run in runs for record in run.records])
    return found


def streams(artifact: Artifact, loads: Sequence[Load], rounds: int, progress: Progress) -> Table:
    """Tokens a second of each load, through the engine and then through the server.

    Each path has a thread of its own for its tensor work, and the first is gone before the second begins: with two, OpenMP
    would have more workers than cores, and both would be slower than either is when it serves.

    Raises:
        ArtifactError: the artifact cannot be served.
    """
    for load in loads:
        load.check(artifact.manifest.limits.max_model_len)
    found: dict[tuple[int, str], dict[str, Value]] = {}
    with progress.bar("streams", 2 * len(loads)) as bar:

        def engine_rounds() -> None:
            executor = TimedExecutor(artifact)
            for load in loads:
                runs = interleave({"engine": partial(through_engine, executor, executor.calls, load)}, rounds)
                found[load.streams, "engine"] = row(load, "engine", runs["engine"])
                bar.step(f"{load.streams} streams through the engine")

        with ThreadPoolExecutor(1) as thread:
            thread.submit(engine_rounds).result()
        running = services.start_service(artifact)
        try:
            with serving(running.service) as url:
                for load in loads:
                    one = partial(_socket_round, url, load, int(artifact.manifest.model["vocab_size"]))
                    found[load.streams, "websocket"] = row(load, "websocket", interleave({"websocket": one}, rounds)["websocket"])
                    bar.step(f"{load.streams} streams through the websocket")
        finally:
            running.engine.stop(drain=False)
    rows = [found[load.streams, path] for load in loads for path in ("engine", "websocket")]
    notes = (
        f"{loads[0].prompt_tokens} prompt tokens and {loads[0].tokens} generated, each stream; greedy, end of text ignored; tok/s over "
        f"the whole time, prefill included; medians (smallest..largest) of {rounds} rounds",
        "first all rounds through the engine, then all through the websocket: each with the tensor work on one thread of its own",
        "websocket: server and client run in one process, all streams on one connection; a token that completes no character arrives "
        "with the next that does",
        "host: what surrounds the executable in a decode step: scheduling, packing inputs, book-keeping, events",
        "tokens a step: that verifies drafts, of each request in it: the drafts it accepts and the token after them",
    )
    return Table("streams", "Throughput through the whole engine", COLUMNS, tuple(rows), notes)
