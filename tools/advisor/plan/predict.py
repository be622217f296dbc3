"""The prediction of a case: latencies, throughput, memory, what binds, an interval and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....graphs.errors import SpecError
from ....graphs.steps.decode import DECODE
from ....graphs.steps.prefill import PREFILL
from ....graphs.types import Bucket
from .acceptance import per_request
from .decode import CAUSES, decode_parts, decode_seconds
from .disaggregated import simulate_disaggregated
from .memory import fixed_bytes, pool_tokens, request_bytes, token_bytes
from .parameters import PlanParameters, fitted
from .prefill import prefill_time
from .run import RunLatencies, Trace
from .simulate import SimulatedSetting, simulate
from .system import LoadCase
from .table import StepTable, step_table

CALIBRATED = {"tpot_ms": 0.09, "output_tok_s": 0.08, "ttft_ms": 0.35, "e2e_ms": 0.09}
UNCALIBRATED = 0.30
"""Standard deviation of the logarithm for kernels that no published row fixes; see docs/planning.md."""
_80_PERCENT = 1.2816
_FUSED_TOKENS, _FUSED_RANKS = 50, 32


@dataclass(frozen=True)
class Prediction(RunLatencies):
    """A prediction.

    Attributes:
        parts_ms: where a token's time goes: step causes over the tokens of a step, stalls of prefill, and rest.
        interval: 80 % intervals of tpot_ms, output_tok_s, ttft_ms and e2e_ms.
        binding: "memory", "prefill", "decode", "bucket" or "exchange".
        why: the figure that decides `binding`.
        memory: GiB of a rank by kind.
        assumed: what was assumed because it is not known.
    """

    parts_ms: Mapping[str, float]
    interval: Mapping[str, tuple[float, float]]
    binding: str
    why: str
    memory: Mapping[str, float]
    step_ms: float
    assumed: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        spreads = {name: getattr(self, f"{name}_ms") for name in ("tpot", "ttft", "itl", "e2e")}
        return {
            **{f"{name}_ms": round(spread.mean, 3) for name, spread in spreads.items()},
            "output_tok_s": round(self.output_tok_s, 3),
            "interval": {name: [round(edge, 3) for edge in edges] for name, edges in self.interval.items()},
            "binding": self.binding,
            "why": self.why,
            "percentiles": {f"{name}_ms": spread.as_dict() for name, spread in spreads.items()},
            "priority_ttft_ms": {str(level): spread.as_dict() for level, spread in self.priority_ttft_ms.items()},
            "breakdown_ms": {name: round(part, 3) for name, part in self.parts_ms.items()},
            "step_ms": round(self.step_ms, 3),
            "memory_gib": {name: round(part, 3) for name, part in self.memory.items()},
            "retracted": self.trace.retracted,
            "assumed": list(self.assumed),
        }


def predict(case: LoadCase, parameters: PlanParameters | None = None) -> Prediction:
    """Predicts a case.

    Args:
        parameters: by default those of `parameters.json`.

    Raises:
        SpecError: weights and states alone, or one request, exceed the memory.
    """
    p = parameters or fitted()
    table, pool = _decode_table(case, p)
    return _summary(case, p, table, pool, _run(case, p, table, pool))


def _decode_table(case: LoadCase, p: PlanParameters) -> tuple[StepTable, float]:
    pool = pool_tokens(case.decode, case.serving)
    work = case.workload
    longest = max(i + o for i, o in zip(work.inputs, work.outputs, strict=True))
    if pool < longest:
        gib, fixed = 2**30, sum(fixed_bytes(case.decode).values())
        limit = case.serving.memory_fraction * case.decode.machine.npu.usable_hbm_bytes
        states = case.serving.max_running * request_bytes(case.decode)
        raise SpecError(
            f"a rank of {case.decode.layout} has {limit / gib:.2f} GiB for weights and pools; weights take {fixed / gib:.2f}, recurrent "
            f"states {states / gib:.2f}, one request of {longest} tokens {longest * token_bytes(case.decode) / gib:.2f}: "
            "legal are more ranks, narrower weights or fewer requests"
        )
    most = min(case.serving.max_running, work.concurrency)
    return step_table(case.decode, p, most, float(min(work.inputs)), float(longest)), pool


def _run(case: LoadCase, p: PlanParameters, table: StepTable, pool: float) -> Trace:
    work, layout = case.workload, case.decode.layout
    accepted: list[float] = per_request(case.accepted, case.spread, case.decode.drafts, work.requests).tolist()
    if case.prefill is None or case.prefill_serving is None:
        sizes = _sizes(case) if case.serving.policy == "npucompile" else ()
        groups = layout.dp * layout.instances
        return simulate(SimulatedSetting(work, case.serving, accepted, groups, pool, table, prefill_time(case.decode, p)), sizes)
    setting = SimulatedSetting(work, case.serving, accepted, layout.dp, pool, table, prefill_time(case.prefill, p))
    first = case.prefill.layout
    return simulate_disaggregated(setting, case.prefill_serving, first.dp, first.instances, token_bytes(case.decode), layout.instances)


def _sizes(case: LoadCase) -> tuple[Bucket, ...]:
    serving = case.serving
    chunk = serving.chunk or serving.budget
    many = min(serving.prompts, max(serving.budget // chunk, 1))
    batches = case.decode.buckets or range(1, serving.max_running + 1)
    decode = (DECODE.bucket(batch, case.decode.candidates) for batch in batches)
    return (*decode, *(PREFILL.bucket(prompts, chunk) for prompts in sorted({1, many})))


def _summary(case: LoadCase, p: PlanParameters, table: StepTable, pool: float, trace: Trace) -> Prediction:
    seen = RunLatencies.of(case.workload, trace)
    parts, step_ms, padded = _parts(case, p, table, trace, seen.tpot_ms.mean)
    binding, why = _binding(case, parts, padded, trace, pool)
    centre = {
        "tpot_ms": seen.tpot_ms.mean,
        "output_tok_s": seen.output_tok_s,
        "ttft_ms": seen.ttft_ms.mean,
        "e2e_ms": seen.e2e_ms.mean,
    }
    sd = {name: max(UNCALIBRATED, sd) if uncalibrated(case) else sd for name, sd in CALIBRATED.items()}
    interval = {name: _around(value, sd[name]) for name, value in centre.items()}
    return Prediction(**vars(seen), parts_ms=parts, interval=interval, binding=binding, why=why, memory=memory_of(case, pool),
                      step_ms=step_ms, assumed=case.assumed)  # fmt: skip


def memory_of(case: LoadCase, pool: float) -> dict[str, float]:
    """GiB of a rank by kind."""
    system, gib = case.decode, 2**30
    parts = {name: nbytes / gib for name, nbytes in fixed_bytes(system).items()}
    parts["KV pages"] = pool * token_bytes(system) / gib
    parts["state slots"] = case.serving.max_running * request_bytes(system) / gib
    parts["rest"] = system.machine.npu.usable_hbm_bytes / gib - sum(parts.values())
    return parts


def _parts(case: LoadCase, p: PlanParameters, table: StepTable, trace: Trace, tpot_ms: float) -> tuple[dict[str, float], float, float]:
    """Causes of a token's time in ms, mean step in ms, and the share of a step that padding costs."""
    batches = np.asarray(sorted(trace.decode_s), dtype=int)
    seconds = np.asarray([trace.decode_s[b] for b in batches])
    if not len(batches):
        return {cause: 0.0 for cause in CAUSES} | {"prefill": 0.0, "rest": 0.0}, 0.0, 0.0
    contexts = np.asarray([trace.context_s[b] for b in batches]) / np.maximum(seconds, 1e-12)
    buckets = np.asarray([table.bucket(int(b)) for b in batches])
    every = decode_parts(case.decode, p, buckets, contexts)
    whole, exact = (decode_seconds(case.decode, p, rows, contexts) for rows in (buckets, batches))
    share = {cause: float((part / whole * seconds).sum() / seconds.sum()) for cause, part in every.items()}
    steps = sum(trace.steps.values())
    step_ms = 1e3 * float(seconds.sum()) / max(steps, 1)
    tokens = float(sum(case.workload.outputs) - case.workload.requests)
    # Request-seconds in decode steps and in prefill steps, over all tokens.
    decode_ms = 1e3 * trace.running_s / max(tokens, 1.0)
    stalled = 1e3 * trace.stalled_s / max(tokens, 1.0)
    parts = {cause: decode_ms * part for cause, part in share.items()}
    parts["prefill"] = stalled
    parts["rest"] = max(tpot_ms - decode_ms - stalled, 0.0)
    padded = float(((1 - exact / whole) * seconds).sum() / seconds.sum())
    return parts, step_ms, padded


def _binding(case: LoadCase, parts: Mapping[str, float], padded: float, trace: Trace, pool: float) -> tuple[str, str]:
    total = sum(parts.values()) or 1.0
    if trace.retracted or trace.waiting > case.workload.requests / 20:
        return "memory", f"{pool:,.0f} tokens of a group's caches; {trace.retracted} requests lost theirs"
    if case.prefill is not None:
        busy = trace.prefill_busy_s / trace.makespan_s / case.prefill.layout.instances
        if busy > 0.9:
            return "prefill", f"prefill instances compute {100 * busy:.0f} % of the time"
    if not trace.steps:
        return "prefill", "no step decodes: every answer is the token that its prompt gives"
    if parts["prefill"] / total > 0.35:
        return "prefill", f"{100 * parts['prefill'] / total:.0f} % of a token's time is prefill of other requests"
    if padded > 0.10:
        return "bucket", f"padding is {100 * padded:.0f} % of decode steps"
    if parts["exchange"] == max(parts[cause] for cause in CAUSES) and parts["exchange"]:
        return "exchange", f"dispatch and combine are {100 * parts['exchange'] / total:.0f} % of a token's time"
    largest = max(CAUSES, key=lambda cause: parts[cause])
    return "decode", f"{largest} is {100 * parts[largest] / total:.0f} % of a token's time"


def uncalibrated(case: LoadCase) -> str:
    """The kernels of a case that no published measurement fixes; "" where all are."""
    shape, layout = case.decode.shape, case.decode.layout
    if shape.kind in ("linear", "sparse"):
        return f"{shape.kind} attention"
    rows = min(case.serving.max_running, case.workload.concurrency // layout.dp) * case.decode.candidates / layout.tp
    if layout.fused and layout.ranks >= _FUSED_RANKS and rows > _FUSED_TOKENS:
        return "fused expert exchange"
    return ""


def _around(value: float, sd: float) -> tuple[float, float]:
    factor = float(np.exp(_80_PERCENT * sd))
    return value / factor, value * factor
