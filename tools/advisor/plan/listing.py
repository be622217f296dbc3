"""Published deployments as `npucompile deployments` lists them: as text, and as plain values."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from ....graphs.errors import SpecError
from ....graphs.sizes import Limits
from ...builder.deployments import DEFAULT, Deployment, Phase, limits_for, prefill_chunk, prefill_sizes, why_not
from ...notation import format_buckets
from ...serve.lines import RowLines, lines_of

NOT_BUILT = "not built"


def buildable(row: Deployment) -> bool:
    """Whether a row has a preset and a published launch command."""
    return not why_not(row)


def of_model(rows: list[Deployment], model: str) -> list[Deployment]:
    """Those of one model.

    Raises:
        SpecError: there is none; names the model whose name is nearest.
    """
    matching = [row for row in rows if row.model == model]
    if matching:
        return matching
    models = tuple(dict.fromkeys(row.model for row in rows))
    near = difflib.get_close_matches(model.lower(), models, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise SpecError(f"no deployment is of model {model!r}{hint}; legal are {', '.join(models)}")


def as_dict(row: Deployment) -> dict[str, Any]:
    """A row as plain values, with what a build derives from it."""
    fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "phases"}
    phases = {name: _phase_dict(row, phase) for name, phase in row.phases.items()}
    chunk, prompts = (prefill_chunk(row), prefill_sizes(row)[-1].prompts) if row.phases else (None, None)
    sizes = {"nodes": row.nodes, "npus": row.npus, "prefill_chunk": chunk, "prefill_prompts": prompts}
    return {**fields, **sizes, "buildable": buildable(row), "why": why_not(row), "commands": as_commands(row), "phases": phases}


def as_commands(row: Deployment) -> dict[str, Any] | None:
    """What builds and serves a row as plain values; None for one that is not built."""
    if not buildable(row):
        return None
    found = commands_of(row)
    return {"build": found.build, "serve": found.lines, "replicas": list(found.replicas)}


def table(rows: list[Deployment]) -> list[str]:
    """A line per deployment; those that cannot be built yet come last."""
    built, other = [row for row in rows if buildable(row)], [row for row in rows if not buildable(row)]
    heading = ("id", "model", "target", "mesh", "quant", "in/out", "drafts", "buckets")
    cells = [heading, *(_cells(row) for row in (*built, *other))]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heading) - 1)]
    lines = ["  ".join((*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1])) for line in cells]
    shown = lines[: 1 + len(built)] if built else lines[:1]
    if other:
        shown += ["", f"{NOT_BUILT}:", *lines[1 + len(built) :]]
    named = next((row for row in built if DEFAULT.get(row.model) == row.id), built[0] if built else None)
    if named is not None:
        shown += ["", f"* the default of its model; build another by its id: {lines_of(named).build}"]
    return shown


def details(row: Deployment) -> list[str]:
    """One deployment in detail, with the command that builds it."""
    lines = [
        f"{row.id}: {row.model} on {row.target}, {_count(row.nodes, 'node')}, {row.npus} NPUs",
        f"source        {row.source}",
        f"quantization  {row.quantization}{_known(', drafts ', row.draft_quantization)}{_known(', recurrent state ', row.state_dtype)}",
    ]
    if row.input_len is not None:
        cached, in_flight = _known(", cached share ", row.prefix_hit_rate or None), _known(", requests in flight ", row.concurrency)
        lines.append(f"traffic       {row.input_len} tokens in, {row.output_len} out{cached}{in_flight}")
    if row.tpot_target_ms is not None:
        lines.append(f"time a token  at most {row.tpot_target_ms} ms")
    if row.measured:
        lines.append("published     " + ", ".join(f"{name} {value}" for name, value in row.measured.items()))
    if row.note:
        lines.append(f"note          {row.note}")
    for phase in row.phases.values():
        lines += ["", *_phase_lines(row, phase)]
    return [*lines, "", *(commands_of(row).shown() if buildable(row) else (f"{NOT_BUILT}: {why_not(row)}",))]


def commands_of(row: Deployment) -> RowLines:
    """What builds and serves a row."""
    from ...builder.deviations import source_of  # Late, as below: it loads torch, and a table needs none.

    return lines_of(row, dense=not getattr(source_of(row).model.config, "num_experts", 0))


def _phase_lines(row: Deployment, phase: Phase) -> list[str]:
    limits = _limits(row, phase)
    buckets = f"{format_buckets(phase.buckets)} rows a dp group" if phase.buckets else "no decoding"
    servers = f"{_count(phase.instances, 'instance')} of {_count(phase.nodes, 'node')}"
    lines = [
        f"{phase.name}: {servers}, mesh {phase.mesh}, experts over {phase.ep} ranks",
        f"  requests      {phase.max_running_requests} in all, {phase.group_requests} a dp group",
        f"  buckets       {buckets}, {phase.num_speculative_tokens} drafts",
        f"  context       {limits.max_model_len} tokens{_known(', published ', phase.context_len)}",
        f"  pages         {limits.num_pages - 1} of {limits.page_size} tokens{_known(', published tokens ', phase.max_total_tokens)}",
        f"  state slots   {limits.num_slots - 1}, {limits.slots_per_request} a request",
    ]
    if phase.name != "decode":
        prompts = prefill_sizes(row)[-1].prompts
        shared = f", or of {prompts} prompts at once" if prompts > 1 else ""
        lines.append(f"  prefill       chunks of {prefill_chunk(row)} tokens{shared}{_known(', published ', phase.chunk_len)}")
    if buildable(row):
        lines += [f"  differs       {line}" for line in _deviations(row, phase)]
    if phase.mem_fraction is not None:
        lines.append(f"  memory        published share for weights and pools {phase.mem_fraction}")
    return lines


def _phase_dict(row: Deployment, phase: Phase) -> dict[str, Any]:
    fields = {f.name: getattr(phase, f.name) for f in dataclasses.fields(phase) if f.name != "name"}
    limits = dataclasses.asdict(_limits(row, phase))
    different = list(_deviations(row, phase)) if buildable(row) else []
    sizes = {"mesh": str(phase.mesh), "buckets": list(phase.buckets), "group_requests": phase.group_requests, "limits": limits}
    return {**fields, **sizes, "deviations": different}


def _limits(row: Deployment, phase: Phase) -> Limits:
    from ...builder.targets import target

    return limits_for(row, phase, target(row.target).page_size)


def _deviations(row: Deployment, phase: Phase) -> tuple[str, ...]:
    from ...builder.deviations import deviations, source_of

    return deviations(row, phase, source_of(row))


def _cells(row: Deployment) -> tuple[str, ...]:
    phases = row.phases.values()
    buckets = next((format_buckets(phase.buckets) for phase in phases if phase.buckets), "-")
    meshes = " ".join(f"{name[0].upper()}:{phase.mesh}" if name != "mixed" else str(phase.mesh) for name, phase in row.phases.items())
    traffic = f"{row.input_len}/{row.output_len}" if row.input_len is not None else "-"
    name = row.id + ("*" if DEFAULT.get(row.model) == row.id else "")
    return name, row.model, row.target, meshes or "-", row.quantization, traffic, str(row.num_speculative_tokens), buckets


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _known(label: str, value: object) -> str:
    return "" if value is None else f"{label}{value}"
