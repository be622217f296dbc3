"""A server of an artifact, simulated with the times of its own graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ...graphs.errors import SpecError
from ...graphs.types import Bucket, Mesh
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.artifact.fixed_cost import fixed_tokens
from .acceptance import per_request
from .products import Array
from .run import Spread, Trace, by_priority, weighted
from .simulate import simulate
from .system import Serving, Workload
from .table import StepTable

GraphSeconds = Callable[[GraphEntry, int, int], float]
"""Seconds of one step of a graph with so many live rows, whose requests have so many cached tokens."""


@dataclass(frozen=True)
class Served:
    """What clients of a simulated server see; times in ms (`Prediction`)."""

    tpot_ms: Spread
    ttft_ms: Spread
    e2e_ms: Spread
    itl_ms: Spread
    output_tok_s: float
    trace: Trace
    priority_ttft_ms: Mapping[int, Spread]

    @staticmethod
    def of(workload: Workload, trace: Trace) -> Served:
        """The latencies of a run."""
        sent, first, end = (np.asarray(times) * 1e3 for times in (trace.sent, trace.first, trace.end))
        outputs = np.asarray(workload.outputs, dtype=float)
        several = outputs > 1
        tpot = (end - first)[several] / (outputs - 1)[several] if several.any() else np.zeros(1)
        gaps = weighted([(gap * 1e3, count) for gap, count in trace.gaps])
        tok_s, urgent = float(outputs.sum()) / trace.makespan_s, by_priority(first - sent, workload.priorities)
        return Served(Spread.of(tpot), Spread.of(first - sent), Spread.of(end - sent), gaps, tok_s, trace, urgent)


def serve(
    artifact: Artifact,
    workload: Workload,
    graph_seconds: GraphSeconds,
    host_s: Callable[[int], float],
    accepted: float = 1.0,
    spread: float = 0.0,
    itl_target_ms: float | None = None,
) -> Served:
    """Serves a workload.

    Args:
        graph_seconds: of a step on the device.
        host_s: what the host adds to a step of so many live rows.
        accepted: tokens a step of a request on average.
        spread: their coefficient of variation over requests.
        itl_target_ms: of the server (`Serving`).

    Raises:
        SpecError: a request is longer than the artifact serves.
    """
    manifest = artifact.manifest
    limits = manifest.limits
    longest = max(i + o for i, o in zip(workload.inputs, workload.outputs, strict=True))
    if longest > limits.max_model_len:
        raise SpecError(f"a request of {longest} tokens; {artifact.path} serves up to {limits.max_model_len}")
    decode = sorted((entry for entry in manifest.graphs if entry.bucket.kind == "decode"), key=lambda entry: entry.bucket)
    prefill = {(e.bucket.batch, e.bucket.q_len): e for e in manifest.graphs if e.bucket.kind == "prefill"}
    if not decode or not prefill:
        raise SpecError(f"{artifact.path} has {len(decode)} decode and {len(prefill)} prefill buckets; serving needs at least one of each")
    dp = Mesh.parse(manifest.mesh).axis("dp")
    shortest = min(workload.inputs)

    largest = decode[-1].bucket.batch

    def step_s(rows: int, context: int) -> float:
        entry = next(entry for entry in decode if entry.bucket.batch >= rows)
        return graph_seconds(entry, rows, max(context, 1)) + host_s(rows)

    def seconds(rows: Array, context: Array) -> Array:
        low, high = (np.asarray([[step_s(int(count), end)] for count in rows[:, 0]]) for end in (shortest, longest))
        result: Array = low + (high - low) * (context - shortest) / max(longest - shortest, 1)
        return result

    def prefill_seconds(batch: int, prompts: int, new: float, cached: float) -> float:
        return graph_seconds(prefill[batch, int(new)], batch, max(int(cached), 1)) + host_s(batch)

    table = StepTable(range(1, largest + 1), shortest, longest, seconds)
    chunk, most = max(q for _, q in prefill), max(b for b, _ in prefill)
    fixed = fixed_tokens(manifest)
    most_running = limits.num_request_slots - 1
    serving = Serving("npucompile", most_running, chunk * most, chunk, most, itl_target_ms=itl_target_ms, fixed_tokens=fixed)
    rates: list[float] = per_request(accepted, spread, limits.drafts, workload.requests).tolist()
    pool = float((limits.num_pages - 1) * limits.page_size)
    sizes = tuple(sorted(entry.bucket for entry in (*prefill.values(), *decode)))
    return Served.of(workload, simulate(workload, serving, rates, dp, pool, table, prefill_seconds, False, sizes))


def bucket_named(name: str) -> Bucket:
    """The bucket of a name such as decode-b4-q1.

    Raises:
        SpecError: it is none.
    """
    parts = name.split(" ")[0].split("-")
    if len(parts) != 3 or parts[1][:1] != "b" or parts[2][:1] != "q" or not (parts[1][1:] + parts[2][1:]).isdecimal():
        raise SpecError(f"{name!r} is no bucket; legal is a name as decode-b4-q1")
    return Bucket(parts[0], int(parts[1][1:]), int(parts[2][1:]))


def value_of(cell: object) -> float | None:
    """The median of a cell of `bench --json`."""
    if isinstance(cell, Mapping):
        return float(cell["median"])
    return float(cell) if isinstance(cell, int | float) else None
