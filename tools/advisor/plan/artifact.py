"""What `npucompile plan --artifact` shows: a server of an artifact for NPUs, simulated with the times of its own graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ....graphs.errors import SpecError
from ....graphs.steps.prefill import PREFILL
from ....graphs.steps.table import kind_of
from ....graphs.types import Mesh
from ....lowering.artifact.artifact import Artifact, GraphEntry
from ....lowering.artifact.fixed_cost import fixed_tokens
from ...builder.targets import target
from ...inspection.cost import step_cost
from ...progress import Progress
from .acceptance import per_request
from .asked import Asked
from .prediction import ACCEPTED
from .products import Array
from .recipe import serve_command
from .run import RunLatencies
from .simulate import SimulatedSetting, simulate
from .system import PlannedServing, Workload
from .table import StepTable
from .views import PlanResult, latency_lines, missed, workload_of

GraphSeconds = Callable[[GraphEntry, int], float]
"""Seconds of one step of a graph whose requests have so many cached tokens."""

_HOST_S = 1e-3
"""What the host is taken to add to a step on NPUs: assumed."""


def artifact_view(path: Path, asked: Asked) -> PlanResult:
    """The prediction of an artifact's server.

    Raises:
        SpecError: the artifact is for CPUs, or the options lack what is needed.
    """
    artifact = Artifact.open(path, check=False)
    if target(artifact.manifest.target).local:
        raise SpecError(
            f"{path} is for this machine, whose speed is measured and not predicted: legal is an artifact for NPUs, or "
            f"`npucompile bench {path} --only decode,prefill,streams`"
        )
    work = workload_of(asked)
    entries = {entry.bucket.name: entry for entry in artifact.manifest.graphs}

    progress, priced = Progress(), set[str]()

    @functools.cache
    def step_s(bucket: str, context: int) -> float:
        step_ms = step_cost(artifact, entries[bucket], context).step_ms
        if bucket not in priced:
            priced.add(bucket)
            progress.say(f"{bucket}, {context} cached tokens: {step_ms:.1f} ms (estimate)")
        return step_ms / 1e3

    drafts = artifact.manifest.limits.drafts
    accepted = asked.accepted or (min(ACCEPTED, drafts + 1.0) if drafts else 1.0)
    target_ms = asked.itl_target
    seen = serve(artifact, work, lambda entry, context: step_s(entry.bucket.name, context) + _HOST_S, accepted, target_ms)
    command = serve_command(str(artifact.path), PlannedServing(itl_target_ms=target_ms), work)
    data = {
        "artifact": str(artifact.path),
        "accepted": accepted,
        "predicted": {
            "tpot_ms": seen.tpot_ms.mean,
            "ttft_ms": seen.ttft_ms.mean,
            "e2e_ms": seen.e2e_ms.mean,
            "itl_ms": seen.itl_ms.as_dict(),
            "output_tok_s": seen.output_tok_s,
            "priority_ttft_ms": {str(level): spread.as_dict() for level, spread in seen.priority_ttft_ms.items()},
        },
        "serve": command,
    }
    lines = [
        f"{artifact.path}: {work.requests} requests, {work.concurrency} in flight, {accepted:g} tokens a step",
        f"predicted  TPOT {seen.tpot_ms.mean:.1f} ms, {seen.output_tok_s:,.0f} tok/s, TTFT {seen.ttft_ms.mean:,.0f} ms, "
        f"E2E {seen.e2e_ms.mean:,.0f} ms",
        *latency_lines(seen.itl_ms, seen.priority_ttft_ms),
        f"serve      {command}",
    ]
    misses = " and ".join(missed(seen, asked.tpot, asked.ttft))
    refused = f"{artifact.path} does not meet the target: {misses}" if misses else ""
    return PlanResult(
        data, lines, sorted(entry.bucket.batch for entry in artifact.manifest.graphs if kind_of(entry.bucket).decodes), refused=refused
    )


def serve(
    artifact: Artifact, workload: Workload, seconds: GraphSeconds, accepted: float = 1.0, itl_target_ms: float | None = None
) -> RunLatencies:
    """Serves a workload.

    Args:
        seconds: of a step, with what the host adds.
        accepted: tokens a step of a request.
        itl_target_ms: of the server (`PlannedServing`).

    Raises:
        SpecError: a request is longer than the artifact serves, or it has no bucket of one of both kinds.
    """
    manifest = artifact.manifest
    limits = manifest.limits
    longest = max(i + o for i, o in zip(workload.inputs, workload.outputs, strict=True))
    if longest > limits.max_model_len:
        raise SpecError(f"a request of {longest} tokens; {artifact.path} serves up to {limits.max_model_len}")
    decode = sorted((entry for entry in manifest.graphs if kind_of(entry.bucket).decodes), key=lambda entry: entry.bucket)
    prefill = {(e.bucket.batch, e.bucket.q_len): e for e in manifest.graphs if e.bucket.kind == PREFILL.name}
    if not decode or not prefill:
        raise SpecError(f"{artifact.path} has {len(decode)} decode and {len(prefill)} prefill buckets; serving needs at least one of each")
    shortest = min(workload.inputs)

    def decode_s(rows: Array, context: Array) -> Array:
        entries = [next(entry for entry in decode if entry.bucket.batch >= int(count)) for count in rows[:, 0]]
        low, high = (np.asarray([[seconds(entry, max(end, 1))] for entry in entries]) for end in (shortest, longest))
        result: Array = low + (high - low) * (context - shortest) / max(longest - shortest, 1)
        return result

    def prefill_s(batch: int, prompts: int, new: float, cached: float) -> float:
        return seconds(prefill[batch, int(new)], max(int(cached), 1))

    table = StepTable(range(1, decode[-1].bucket.batch + 1), shortest, longest, decode_s, lazily=True)
    chunk, most = max(q for _, q in prefill), max(b for b, _ in prefill)
    fixed = fixed_tokens(manifest)
    most_running = limits.num_request_slots - 1
    serving = PlannedServing("npucompile", most_running, chunk * most, chunk, most, itl_target_ms=itl_target_ms, fixed_tokens=fixed)
    rates: list[float] = per_request(accepted, 0.0, limits.drafts, workload.requests).tolist()
    pool = float((limits.num_pages - 1) * limits.page_size)
    sizes = tuple(sorted(entry.bucket for entry in (*prefill.values(), *decode)))
    dp = Mesh.parse(manifest.mesh).axis("dp")
    return RunLatencies.of(workload, simulate(SimulatedSetting(workload, serving, rates, dp, pool, table, prefill_s), sizes))
