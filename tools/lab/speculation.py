"""Measures the gain from drafting: an artifact against the same one without drafts, on held-out text."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...graphs.errors import SpecError
from ...graphs.steps.table import kind_of
from ...lowering.artifact.artifact import Artifact
from ...runtime.cpu_executor import CpuExecutor
from ...runtime.engine import Engine
from ...runtime.executor import Executor
from ...server.run import serving
from ...server.text.tokenizer import TextTokenizer
from ..bench import acceptance
from ..bench.report import Column, ReportTable, Value
from ..bench.serve.apart import ApartClient
from ..bench.stats import interleave, ratio, spread
from ..bench.streams import Run, StreamLoad, TimedExecutor, through_stepped, through_websocket
from ..progress import Progress
from ..serve import serving as services

COLUMNS = (
    Column("streams", "streams", 0),
    Column("path", "through"),
    Column("without_tokens_per_s", "k = 0 tok/s", 1),
    Column("with_tokens_per_s", "drafting tok/s", 1),
    Column("gain", "drafting / k = 0"),
    Column("of_fixed", "drafting / best fixed width"),
    Column("acceptance_length", "tokens a step"),
    Column("acceptance_rates", "accepted by position"),
    Column("equal", "equal streams"),
)
WITH, WITHOUT = "with", "without"

Side = str | int
"""An artifact with the width of steps that its server chooses, or the drafting one with a width of its own."""


@dataclass(frozen=True)
class TextLoad(StreamLoad):
    """A load whose prompts are text.

    Attributes:
        texts: token ids of the prompts. A round takes one per stream, the next round the ones after them.
        round: number of the round, from 0.
    """

    texts: tuple[tuple[int, ...], ...] = ()
    round: int = 0

    def prompts(self, vocab: int) -> list[list[int]]:
        """Token ids of this round, [streams][up to prompt_tokens]."""
        first = self.round * self.streams
        return [list(self.texts[(first + i) % len(self.texts)][: self.prompt_tokens]) for i in range(self.streams)]


def next_rounds(load: TextLoad, serve: Callable[[TextLoad], Run]) -> Callable[[], Run]:
    """Serves the rounds of one load, one a call, each with its own prompts."""
    rounds = itertools.count()
    return lambda: serve(replace(load, round=next(rounds)))


def check(drafting: Artifact, plain: Artifact) -> None:
    """Refuses artifacts that differ in more than drafts.

    Raises:
        SpecError: naming the difference.
    """
    k, none = drafting.manifest.limits.drafts, plain.manifest.limits.drafts
    if not k or none:
        raise SpecError(f"{drafting.path} drafts {k} tokens a step and {plain.path} {none}; legal are at least 1, and 0")
    for what in ("dtype", "target", "backend", "source_digest"):
        here, there = getattr(drafting.manifest, what), getattr(plain.manifest, what)
        if here != there:
            raise SpecError(f"{what} of {drafting.path} is {here}, of {plain.path} {there}; legal are equal ones")


def read_prompts(path: Path, codec: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of the lines of a file.

    Raises:
        SpecError: the file has no lines.
    """
    texts = tuple(tuple(codec.encode(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not texts:
        raise SpecError(f"{path} has no prompts; legal is a text file with one per line")
    return texts


def speculation(
    drafting: Artifact, plain: Artifact, texts: tuple[tuple[int, ...], ...], loads: Sequence[StreamLoad], rounds: int, progress: Progress
) -> ReportTable:
    """Serves each load with both artifacts alternately, first through the engine and then through the websocket.

    Raises:
        SpecError: the artifacts differ in more than drafts, or a load does not fit the context.
    """
    check(drafting, plain)
    sides = {WITH: drafting, WITHOUT: plain}
    rows = []
    with progress.bar("speculation", 2 * len(loads)) as bar:
        for load in loads:
            load.check(drafting.manifest.limits.max_model_len)
            text_load = TextLoad(load.streams, load.prompt_tokens, load.tokens, texts=texts)
            # In a thread that ends before the servers start, because OpenMP keeps a worker pool for every thread that ran operators.
            with ThreadPoolExecutor(1) as thread:
                engine = thread.submit(_through_engines, sides, text_load, rounds).result()
            rows.append(row(load, "engine", engine))
            bar.step(f"{load.streams} streams through the engine")
            serve: dict[Side, Callable[[], Run]] = {
                name: next_rounds(text_load, partial(_served, artifact)) for name, artifact in sides.items()
            }
            rows.append(row(load, "websocket", interleave(serve, rounds)))
            bar.step(f"{load.streams} streams through the websocket")
    k = drafting.manifest.limits.drafts
    notes = (
        f"k = {k}; {loads[0].tokens} tokens generated by each stream after up to {loads[0].prompt_tokens} of its prompt; greedy, end of "
        f"text ignored; tok/s over the whole time, prefill included; medians (smallest..largest) of {rounds} rounds, both in turns",
        f"{len(texts)} prompts, the next ones in every round; both artifacts get the same",
        "tokens a step: of decode steps, the token after the accepted drafts included; accepted by position: share of steps that accepted "
        "the first, the second, ... draft",
        "equal streams: all rounds, token for token",
        "best fixed width: the fastest of engines that decode in steps of one width of the same artifact (--draft-widths)",
    )
    return ReportTable("speculation", "Drafting", COLUMNS, tuple(rows), notes)


def _through_engines(sides: dict[str, Artifact], load: TextLoad, rounds: int) -> dict[Side, list[Run]]:
    executors = {name: TimedExecutor(artifact) for name, artifact in sides.items()}
    drafting = executors[WITH]
    widths = sorted({bucket.q_len for bucket in drafting.buckets if kind_of(bucket).decodes})
    engines: dict[Side, tuple[TimedExecutor, Engine]] = {name: (executor, of_width(executor)) for name, executor in executors.items()}
    engines |= {width: (drafting, of_width(drafting, width)) for width in widths if len(widths) > 1}
    serve = {side: next_rounds(load, partial(through_stepped, engine, executor.calls)) for side, (executor, engine) in engines.items()}
    # In the uncounted round engines learn what steps take and what is accepted.
    return interleave(serve, rounds)


def of_width(executor: Executor, width: int | None = None) -> Engine:
    """An engine that decides as a server does; with a width one that decodes in steps of this width alone."""
    engine = Engine(executor, measured=True, refresh_every_s=None)
    if width is not None:
        state = engine.stepper.state
        buckets = tuple(bucket for bucket in executor.buckets if not kind_of(bucket).decodes or bucket.q_len == width)
        engine.stepper.state = replace(state, policy=replace(state.policy, buckets=buckets))
    return engine


def _served(artifact: Artifact, load: TextLoad) -> Run:
    """A round through a server of its own; two servers at once would have more worker threads than cores."""
    running = services.start_service(artifact, lambda: CpuExecutor(artifact))
    try:
        with serving(running.service) as url, ApartClient(url) as client:
            vocab = int(artifact.manifest.model["vocab_size"])
            # A short warm-up request.
            through_websocket(client, replace(load, tokens=8), vocab)
            return through_websocket(client, load, vocab)
    finally:
        running.engine.stop(drain=False)


def row(load: StreamLoad, path: str, runs: Mapping[Side, list[Run]]) -> dict[str, Value]:
    """The table row of one load on one path."""
    speeds = {name: [run.tokens_per_s for run in rounds] for name, rounds in runs.items()}
    records = [record for run in runs[WITH] for record in run.records]
    pairs = [pair for a, b in zip(runs[WITH], runs[WITHOUT], strict=True) for pair in zip(a.token_ids, b.token_ids, strict=True)]
    cells: dict[str, Value] = {
        "streams": load.streams,
        "path": path,
        "without_tokens_per_s": spread(speeds[WITHOUT]),
        "with_tokens_per_s": spread(speeds[WITH]),
        "gain": ratio(speeds[WITH], speeds[WITHOUT]),
        "equal": f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
    }
    if widths := [side for side in speeds if isinstance(side, int)]:
        cells["of_fixed"] = ratio(speeds[WITH], max((speeds[width] for width in widths), key=statistics.median))
    if records:
        cells["acceptance_length"] = acceptance.length(records)
        cells["acceptance_rates"] = ", ".join(f"{rate:.2f}" for rate in acceptance.rates(records))
    return cells
