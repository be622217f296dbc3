"""All that one `npucompile build` makes: an artifact, or one for each side of a deployment that splits prefill from decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..notation import format_buckets
from ..progress import Progress
from . import plan as planning
from .driver import build
from .instance import phases


def build_all(model: str, asked: Mapping[str, Any], out: Path | None, artifacts: Path, cache: Path, jobs: int, nice: int) -> list[Path]:
    """Builds what was asked for: one artifact, or one for each side of a deployment that splits prefill from decode.

    Args:
        asked: fields of `plan.Options` besides the model.
        out: the artifact's directory; None is one named after the model under `artifacts`.

    Raises:
        NpucompileError: naming what cannot be built.
    """
    progress = Progress()
    options = planning.Options(model, **asked)
    split = phases(options.deployment, model) if options.phase is None and options.deployment else ()
    wanted = split if len(split) > 1 else (options.phase,)
    built = []
    # All of them are decided before one is built.
    for plan in [planning.plan(replace(options, phase=phase)) for phase in wanted]:
        for line in plan_lines(plan):
            progress.say(line)
        place = out or planning.default_out(artifacts, plan.source)
        if len(wanted) > 1 or (out is None and options.phase):
            place = place.with_name(f"{place.name}-{plan.phase}")
        report = build(plan, place, cache, progress, jobs=jobs, nice=nice)
        progress.say(f"built in {report.seconds:.1f} s: {len(report.compiled)} compiled, {len(report.reused)} up to date")
        built.append(report.path)
    return built


def plan_lines(plan: planning.Plan) -> list[str]:
    """What will be built, as a person reads it."""
    sizes = f"{plan.params_bytes / 1e6:,.1f} MB of weights, {plan.state_bytes / 1e6:,.1f} MB of state"
    requests = plan.limits.num_request_slots - 1
    lines = [
        f"{plan.source.name}: {len(plan.buckets)} buckets for {plan.backend} ({', '.join(_series(plan))})",
        f"  {sizes}{' a device' if plan.mesh.size > 1 else ''}; context {plan.limits.max_model_len}, {requests} requests in flight"
        f"{' in each of ' + str(plan.mesh.axis('dp')) + ' groups' if plan.mesh.axis('dp') > 1 else ''}",
        *(f"  {note}" for note in plan.notes),
    ]
    if plan.mesh.size > 1 or not plan.target.local:
        drafts = f", {plan.limits.drafts} drafts" if not plan.target.local else ""
        lines.insert(1, f"  target {plan.target.name}, mesh {plan.mesh} ({plan.mesh.size} ranks), quantization {plan.quantization}{drafts}")
    return lines


def _series(plan: planning.Plan) -> list[str]:
    """Buckets as a person writes them: long lists of sizes abbreviated."""
    decode = [b for b in plan.buckets if b.kind == "decode"]
    said = [b.name for b in plan.buckets if b.kind == "prefill"]
    if len(decode) < 8:
        return [*said, *(b.name for b in decode)]
    return [*said, f"decode of {format_buckets(tuple(b.batch for b in decode))} requests, {decode[0].q_len} tokens each"]
