"""A bench of an artifact on this machine, beside what two of its buckets predict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...graphs.errors import SpecError
from ...graphs.types import Bucket
from ...lowering.artifact.artifact import Artifact, GraphEntry
from .acceptance import spread_over_steps
from .artifact import Served, bucket_named, serve, value_of
from .step_law import ReadRates, StepLaw, non_negative
from .system import Workload

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Compared:
    """One figure that was measured, and its prediction.

    Attributes:
        fitted: whether the prediction was fitted to it.
    """

    what: str
    measured: float
    predicted: float
    unit: str
    fitted: bool

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Bench:
    """What was measured of an artifact; times in seconds.

    Attributes:
        decode: (bucket, context, a step).
        reads: (bytes, bytes/s) of a buffer as large as what each of these steps reads.
        buffers: the same of buffers that are of no bucket.
        prefill: a step by bucket.
        streams: rows of requests through the engine, by number of streams.
    """

    decode: Sequence[tuple[GraphEntry, int, float]]
    reads: Sequence[tuple[float, float]]
    buffers: Sequence[tuple[float, float]]
    prefill: Mapping[Bucket, float]
    streams: Mapping[int, Row]

    @staticmethod
    def of(artifact: Artifact, figures: Mapping[str, Sequence[Row]]) -> Bench:
        """The figures of a bench of this artifact.

        Raises:
            SpecError: it is of another one.
        """
        entries = {entry.bucket: entry for entry in artifact.manifest.graphs}

        def entry_of(row: Row) -> GraphEntry:
            entry = entries.get(bucket_named(str(row["bucket"])))
            if entry is None:
                raise SpecError(f"{row['bucket']} was measured and {artifact.path} has no such bucket; legal is a bench of this artifact")
            return entry

        decode, reads, buffers = [], [], []
        for row in figures["decode"]:
            if "bucket" not in row:
                buffers.append((float(row["buffer_mb"]) * 1e6, (value_of(row["gb_per_s"]) or 0.0) * 1e9))
            elif milliseconds := value_of(row.get("compiled_ms")) or value_of(row.get("eager_ms")):
                decode.append((entry_of(row), int(row["context_tokens"]), milliseconds / 1e3))
                reads.append((float(row["read_mb"]) * 1e6, (value_of(row["read_gb_per_s"]) or 0.0) * 1e9))
        prefill = {}
        for row in figures["prefill"]:
            # A second table has prompts that share a step; these buckets are in the first one, too.
            rate = value_of(row.get("compiled_tokens_per_s")) or value_of(row.get("eager_tokens_per_s"))
            if rate:
                bucket = entry_of(row).bucket
                prefill[bucket] = bucket.tokens / rate
        missing = [bucket.name for bucket in entries if bucket.kind == "prefill" and bucket not in prefill]
        if missing:
            raise SpecError(f"{', '.join(missing)} of {artifact.path} was not measured; legal is a bench of all its prefill buckets")
        streams = {int(row["streams"]): row for row in figures["streams"] if value_of(row.get("step_ms")) is not None}
        return Bench(decode, reads, buffers, prefill, streams)


def read_bench(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of each figure of `npucompile bench --json`.

    Raises:
        SpecError: the file is none.
    """
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        rows: dict[str, list[dict[str, Any]]] = {}
        for figure in figures:
            rows.setdefault(figure["figure"], []).extend(figure["rows"])
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"{path} is not what `npucompile bench --json` prints; legal is that, with decode, prefill and streams") from None
    if missing := {"decode", "prefill", "streams"} - set(rows):
        raise SpecError(f"{path} lacks {', '.join(sorted(missing))}; legal is `npucompile bench --only decode,prefill,streams --json`")
    return rows


def compare(artifact: Artifact, figures: Mapping[str, Sequence[Row]], fit_on: Sequence[int], prompt: int, output: int) -> list[Compared]:
    """Predicts what a bench measured from two of its buckets.

    Steps of other buckets follow from what their graphs compute and read; throughput from the simulated scheduler. From the engine's own
    runs at the loads of the fitted buckets (without two of these: at the smallest and the largest load) come what the host adds to a
    step, what executables take between the host's work beside what they take one after the other, and, from the first tokens of the
    smallest load, what these prompts take of a full prefill step.

    Args:
        fit_on: decode batch sizes that are fitted.
        prompt, output: tokens of a request of the bench's streams.

    Raises:
        SpecError: the bench has no such buckets, or is of another artifact.
    """
    bench = Bench.of(artifact, figures)
    fitted = [point for point in bench.decode if point[0].bucket.batch in fit_on]
    if {entry.bucket.batch for entry, *_ in fitted} != set(fit_on):
        known = sorted({entry.bucket.batch for entry, *_ in bench.decode})
        raise SpecError(f"buckets to fit are {','.join(map(str, fit_on))}; the bench measured {', '.join(map(str, known))}")
    # Of the other buckets not even the rate at which a buffer of their size was read beside them is used.
    reads = [read for read, point in zip(bench.reads, bench.decode, strict=True) if point in fitted]
    law = StepLaw.fit(artifact.manifest, fitted, ReadRates([*reads, *bench.buffers]))
    steps = [
        Compared(
            f"{entry.bucket.name} at {context}",
            1e3 * seconds,
            1e3 * law.seconds(entry, entry.bucket.batch, context),
            "ms",
            entry.bucket.batch in fit_on,
        )
        for entry, context, seconds in bench.decode
    ]
    return [*steps, *_Streams(artifact, bench, law, prompt, output).compared(fit_on)]


class _Streams:
    """The loads of a bench, served by the simulated scheduler."""

    def __init__(self, artifact: Artifact, bench: Bench, law: StepLaw, prompt: int, output: int) -> None:
        self.artifact, self.bench, self.law, self.prompt, self.output = artifact, bench, law, prompt, output
        self.decode = sorted((entry for entry in artifact.manifest.graphs if entry.bucket.kind == "decode"), key=lambda e: e.bucket)

    def compared(self, fit_on: Sequence[int]) -> list[Compared]:
        """Throughput of each load beside its prediction."""
        streams = self.bench.streams
        loads = [count for count in streams if count in fit_on]
        if len(loads) < 2 and streams:
            loads = sorted({min(streams), max(streams)})
        # Which rows a step has depends on how prefill and decode take turns, and hardly on how long they take.
        rows = {count: self.median_rows(count) for count in loads}
        host = host_of([(rows[count], (value_of(streams[count].get("host_ms")) or 0.0) / 1e3) for count in loads])
        engine = self.engine(rows)
        padded = self.padded(min(loads), engine, host) if loads else 1.0
        return [
            Compared(f"{count} streams", measured, self.serve(count, engine, padded, host).output_tok_s, "tok/s", count in loads)
            for count, row in streams.items()
            if (measured := value_of(row["tokens_per_s"])) is not None
        ]

    def serve(
        self,
        count: int,
        engine: Callable[[float], float] = lambda seconds: seconds,
        padded: float = 1.0,
        host: Callable[[int], float] = lambda rows: 0.0,
    ) -> Served:
        """So many requests that start together, as the bench sends them.

        Args:
            engine: what a decode step takes in an engine that takes so many seconds by the law.
            padded: factor of prefill steps.
            host: what the engine adds to a step of so many rows.
        """
        drafts = self.artifact.manifest.limits.drafts
        accepted = value_of(self.bench.streams[count].get("acceptance_length")) or 1.0
        spread = spread_over_steps(accepted, drafts, self.output / accepted)

        def seconds(entry: GraphEntry, rows: int, context: int) -> float:
            if entry.bucket.kind == "decode":
                return engine(self.law.seconds(entry, rows, context))
            return padded * self.bench.prefill[entry.bucket]

        return serve(self.artifact, Workload.uniform(self.prompt, self.output, count, count), seconds, host, accepted, spread)

    def median_rows(self, count: int) -> int:
        """Live rows of the median decode step of a load."""
        steps = sorted(self.serve(count).trace.steps.items())
        half, passed = sum(times for _, times in steps) / 2, 0
        for rows, times in steps:
            passed += times
            if passed >= half:
                return rows
        return count

    def padded(self, count: int, engine: Callable[[float], float], host: Callable[[int], float]) -> float:
        """What part of the time of a full prefill step these prompts take, by the first tokens of this load.

        A prompt that does not fill its bucket takes less: kernels of attention and of the delta rule pass over padding, products do not.
        """
        measured, factor = value_of(self.bench.streams[count].get("first_token_ms")), 1.0
        for _ in range(8 if measured else 0):
            factor *= (measured or 0.0) / max(self.serve(count, engine, factor, host).ttft_ms.median, 1e-9)
        return factor

    def engine(self, rows: Mapping[int, int]) -> Callable[[float], float]:
        """What executables take in an engine, of what the law says, by these loads with so many rows in the median step."""
        points = []
        for count, live in rows.items():
            milliseconds = value_of(self.bench.streams[count].get("executable_ms"))
            entry = next((entry for entry in self.decode if entry.bucket.batch >= live), self.decode[-1])
            if milliseconds:
                points.append((self.law.seconds(entry, live, self.prompt + self.output // 2), milliseconds / 1e3))
        return engine_of(points)


def engine_of(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Seconds of a step in an engine, of its seconds one after the other: a fixed part and a factor, neither negative.

    Between two steps the engine's own work takes caches from the model and lets threads fall asleep, which costs a step the same
    whatever it computes; and the longer a step, the more of what runs beside it.

    Args:
        points: pairs of both; one gives a factor, none changes nothing.
    """
    if not points:
        return lambda seconds: seconds
    alone, within = (np.asarray(column, dtype=float) for column in zip(*points, strict=True))
    columns = np.stack([alone, np.ones_like(alone)], axis=1)[:, : len(set(alone.tolist()))] / within[:, None]
    factor, *rest = non_negative(columns, np.ones_like(within))[1].tolist()
    fixed = rest[0] if rest else 0.0
    return lambda seconds: fixed + factor * seconds


def host_of(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """What the host adds to a step, linear in its live rows; without points nothing."""
    if not points:
        return lambda rows: 0.0
    rows, seconds = (np.asarray(column, dtype=float) for column in zip(*points, strict=True))
    if len(set(rows.tolist())) < 2:
        return lambda count: float(seconds.mean())
    slope, fixed = np.polyfit(rows, seconds, 1)
    return lambda count: float(max(fixed + slope * count, 0.0))
