"""Measured step times: those of `bench --json` on this machine, and those of a bring-up's report on NPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ..bench.step import needed_bytes
from ..build.deployments import deployments
from .artifact import StepModel, bucket_named, fit_steps, serve, value_of
from .decode import decode_parts
from .parameters import Parameters
from .published import machine_of
from .shape import shape_of
from .system import Layout, Scheme, System, Workload


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


def compare(
    artifact: Artifact, bench: Mapping[str, Sequence[Mapping[str, Any]]], fit_on: Sequence[int], prompt: int, output: int
) -> list[Compared]:
    """Predicts what a bench measured from two of its buckets.

    Steps of other buckets follow from what their graphs compute and read; throughput from the simulated scheduler, with the host's
    share of a step at the loads of the fitted buckets.

    Args:
        fit_on: decode batch sizes that are fitted.
        prompt, output: tokens of a request of the bench's streams.

    Raises:
        SpecError: the bench has no such buckets or streams.
    """
    entries = {entry.bucket: entry for entry in artifact.manifest.graphs}
    points = _points(artifact, bench["decode"], entries)
    fitted = [point for point in points if point[0].bucket.batch in fit_on]
    if {entry.bucket.batch for entry, *_ in fitted} != set(fit_on):
        known = sorted({entry.bucket.batch for entry, *_ in points})
        raise SpecError(f"--fit-on {','.join(map(str, fit_on))}; the bench measured {', '.join(map(str, known))}")
    model = fit_steps([(_flops(entry), _bytes(artifact, entry, context), seconds) for entry, context, seconds in fitted])
    compared = [
        Compared(
            f"{entry.bucket.name} at {context}",
            1e3 * seconds,
            1e3 * model.seconds(_flops(entry), _bytes(artifact, entry, context)),
            "ms",
            entry.bucket.batch in fit_on,
        )
        for entry, context, seconds in points
    ]
    return [*compared, *_streams(artifact, bench, model, fit_on, prompt, output)]


def _points(
    artifact: Artifact, rows: Sequence[Mapping[str, Any]], entries: Mapping[Any, GraphEntry]
) -> list[tuple[GraphEntry, int, float]]:
    points = []
    for row in rows:
        if "bucket" not in row:
            continue
        milliseconds = value_of(row.get("compiled_ms")) or value_of(row.get("eager_ms"))
        entry = entries.get(bucket_named(str(row["bucket"])))
        if entry is None or milliseconds is None:
            raise SpecError(f"{row['bucket']} was measured and {artifact.path} has no such bucket; legal is a bench of this artifact")
        points.append((entry, int(row["context_tokens"]), milliseconds / 1e3))
    return points


def _flops(entry: GraphEntry) -> float:
    return float(entry.cost["flops"])


def _bytes(artifact: Artifact, entry: GraphEntry, context: int) -> float:
    return float(needed_bytes(artifact.manifest, entry, context))


def _streams(
    artifact: Artifact,
    bench: Mapping[str, Sequence[Mapping[str, Any]]],
    model: StepModel,
    fit_on: Sequence[int],
    prompt: int,
    output: int,
) -> list[Compared]:
    rows = [row for row in bench["streams"] if value_of(row.get("step_ms")) is not None]
    host = host_of([(int(row["streams"]), float(value_of(row["host_ms"]) or 0.0) / 1e3) for row in rows if int(row["streams"]) in fit_on])
    prefills = {
        bucket_named(str(row["bucket"])): value_of(row.get("compiled_ms")) or value_of(row.get("eager_ms")) for row in bench["prefill"]
    }

    slower = _slower_when_served(artifact, rows, model, fit_on, prompt + output // 2)

    def seconds(entry: GraphEntry, context: int) -> float:
        if entry.bucket.kind == "decode":
            return slower * model.seconds(_flops(entry), _bytes(artifact, entry, context))
        return slower * float(prefills[entry.bucket] or 0.0) / 1e3

    compared = []
    for row in rows:
        count = int(row["streams"])
        accepted = value_of(row.get("acceptance_length")) or 1.0
        work = Workload.uniform(prompt, output, count, count)
        served = serve(artifact, work, seconds, host, accepted)
        measured = value_of(row["tokens_per_s"])
        if measured is not None:
            compared.append(Compared(f"{count} streams", measured, served.output_tok_s, "tok/s", count in fit_on))
    return compared


def _slower_when_served(
    artifact: Artifact, rows: Sequence[Mapping[str, Any]], model: StepModel, fit_on: Sequence[int], context: int
) -> float:
    """By which factor executables are slower between the host's work than one after the other: of the fitted loads, the mean logarithm."""
    entries = sorted((e for e in artifact.manifest.graphs if e.bucket.kind == "decode"), key=lambda entry: entry.bucket)
    logs = []
    for row in rows:
        milliseconds, count = value_of(row.get("executable_ms")), int(row["streams"])
        entry = next((e for e in entries if e.bucket.batch >= count), entries[-1])
        if milliseconds and count in fit_on:
            logs.append(math.log(milliseconds / 1e3 / model.seconds(_flops(entry), _bytes(artifact, entry, context))))
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def host_of(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """What the host adds to a step, linear in its rows; without points nothing."""
    if not points:
        return lambda rows: 0.0
    rows, seconds = (np.asarray(column, dtype=float) for column in zip(*points, strict=True))
    if len(set(rows.tolist())) < 2:
        return lambda count: float(seconds.mean())
    slope, fixed = np.polyfit(rows, seconds, 1)
    return lambda count: float(max(fixed + slope * count, 0.0))


@dataclass(frozen=True)
class TimedStep:
    """A decode step that was timed on NPUs."""

    name: str
    system: System
    batch: int
    context: int
    seconds: float

    def predicted_ms(self, parameters: Parameters) -> float:
        """The step's time by these parameters, without the host's work around it."""
        parts = decode_parts(self.system, parameters, self.batch, self.context)
        return 1e3 * sum(float(part) for cause, part in parts.items() if cause != "host")


def read_bringup(path: Path, context: int) -> list[TimedStep]:
    """Decode steps of a bring-up's report.

    Args:
        context: cached tokens of their requests: those of `bringup.steps.StepPlanner.first_decode`.

    Raises:
        SpecError: the file is none, or was not measured on an NPU.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        device, mesh = report["device"], Mesh.parse(report["mesh"])
        timings = [timing for rung in report["rungs"] for timing in rung["timings"] if timing["what"].startswith("decode-b")]
        model, kind, quantization = report["model"], report["target"], report["quantization"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SpecError(f"{path} is no report of a bring-up; legal is its bringup.json") from None
    if device != "npu":
        raise SpecError(f"{path} was measured on {device}; legal is a bring-up on NPUs, whose times are theirs")
    shape = shape_of(model)
    row = next((row for row in deployments().values() if row.model == model), None)
    scheme = Scheme.named("bf16" if quantization == "none" else quantization, row.draft_quantization if row else "bf16")
    layout = Layout(mesh.axis("dp"), mesh.axis("tp"), shape.experts > 0)
    steps = []
    for timing in timings:
        bucket = bucket_named(timing["what"])
        system = System(shape, scheme, layout, machine_of(kind), bucket.q_len - 1)
        steps.append(TimedStep(f"{path.name} {bucket.name}", system, bucket.batch, context, float(timing["seconds"])))
    if not steps:
        raise SpecError(f"{path} has no timed decode bucket; legal is a bring-up that reached the buckets")
    return steps
