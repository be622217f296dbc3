"""Builds all that one `npucompile build` asks for: one artifact, or two for a deployment that disaggregates prefill and decode."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...graphs.errors import LoweringError
from ...graphs.steps.table import kind_of
from ...lowering.backend import backend
from ...lowering.backends.inductor import unpacking
from ...lowering.backends.inductor.backend import NAME as INDUCTOR
from ..notation import format_buckets
from ..progress import Progress
from . import plan as planning
from .answers import Priced, answer
from .driver import build
from .instance import phases
from .pictures import check_served
from .pool import rewriting
from .rank_memory import fit_prompts


def build_all(
    model: str,
    options: Mapping[str, Any],
    out: Path | None,
    artifacts: Path,
    cache: Path,
    jobs: int,
    nice: int,
    *,
    temporary: Path = Path("/tmp"),
) -> list[Path]:
    """Builds a model; returns the artifacts' directories.

    Args:
        options: fields of `plan.Options` besides the model.
        out: the artifact's directory; None means one under `artifacts`, named after the model.
        temporary: where executables are unpacked to be verified.

    Raises:
        NpucompileError: naming what cannot be built.
    """
    progress = Progress()
    request = planning.Options(model, **options)
    instances = phases(request.deployment, model) if request.phase is None and request.deployment else ()
    wanted = instances if len(instances) > 1 else (request.phase,)
    paths = []
    # Every plan is checked before the first is built.
    plans = [planning.plan(replace(request, phase=phase)) for phase in wanted]
    if any(plan.backend == INDUCTOR for plan in plans) and (reason := unpacking.problem(temporary)):
        raise LoweringError(reason)
    for plan in plans:
        check_served(plan)
    priced = Priced(cache)
    # A build for NPUs does nothing but rewrite graphs; one for this machine holds weights too.
    with contextlib.nullcontext() if any(plan.target.local for plan in plans) else rewriting():
        plans = [answer(plan, priced) for plan in plans]
        for plan in plans if request.prefill else [fit_prompts(plan) for plan in plans]:
            for line in plan_lines(plan):
                progress.say(line)
            path = out or planning.default_out(artifacts, plan.source)
            if len(wanted) > 1 or (out is None and request.phase):
                path = path.with_name(f"{path.name}-{plan.phase}")
            report = build(plan, path, cache, progress, jobs=jobs, nice=nice, made=priced.made)
            progress.say(f"built in {report.seconds:.1f} s: {len(report.compiled)} compiled, {len(report.reused)} up to date")
            if note := first_start(plan):
                progress.say(note)
            paths.append(report.path)
    return paths


def first_start(plan: planning.Plan) -> str | None:
    """What the first start on the target still has to do, where this machine cannot do it; None where nothing is left."""
    if plan.target.local or not (reason := backend(plan.backend).runs_here()):
        return None
    if plan.backend == "aclgraph":
        return f"not captured here: {reason}; each start captures its decode buckets on its devices"
    return f"not compiled for the device yet: {reason}; the first start there compiles each bucket, and later ones find it compiled"


def plan_lines(plan: planning.Plan) -> list[str]:
    """A summary of the plan for the terminal."""
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
    if plan.target.cann:
        packages = f", operators of {', '.join(plan.platform.packages)}" if plan.platform.packages else ""
        lines.insert(2, f"  CANN {plan.platform.cann} on {plan.platform.chip}{packages} (--cann, --operator-packages to change)")
    return lines


def _series(plan: planning.Plan) -> list[str]:
    """Names of the buckets; many decode buckets are written in the notation of `--buckets`."""
    decode = [b for b in plan.buckets if kind_of(b).decodes]
    prefill = [b.name for b in plan.buckets if not kind_of(b).decodes]
    if len(decode) < 8:
        return [*prefill, *(b.name for b in decode)]
    widths = format_buckets(sorted({b.q_len for b in decode}))
    return [*prefill, f"decode of {format_buckets(sorted({b.batch for b in decode}))} requests, {widths} tokens each"]
