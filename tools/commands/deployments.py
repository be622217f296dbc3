"""`npucompile deployments`: shows published deployments as a table, one in detail, or as JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import MANIFEST, Artifact
from ..bench import built, prediction
from ..bench.report import Table, as_data, as_markdown
from ..build.deployments import DEFAULT, Deployment, Phase, deployment, deployments, limits_for, prefill_chunk, prefill_sizes
from ..build.deviations import deviations, source_of, why_not
from ..build.targets import target
from ..inspection.cost import step_cost
from ..notation import format_buckets

NOT_BUILT = "not built"


@click.command("deployments")
@click.argument("name", metavar="[ID]", required=False)
@click.option("--model", help="Only deployments of this model.")
@click.option(
    "--predict",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Print the estimated decode steps of the artifacts in DIR, each built with --deployment, as Markdown.",
)
@click.option("--accepted", type=click.FloatRange(1), default=prediction.ACCEPTED, show_default=True, help="Tokens a step for --predict.")
@click.option(
    "--built",
    "builds",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Print graphs, memory and deviations of the artifacts in DIR, each built with --deployment, as Markdown.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(name: str | None, model: str | None, predict: Path | None, accepted: float, builds: Path | None, as_json: bool) -> None:
    """List published Ascend deployments, or show ID in detail.

    A deployment gives a build its target, mesh, quantization, buckets, drafts and context.

    \b
    Examples: npucompile deployments --model qwen3.5-397b
              npucompile deployments qwen35-397b-a3x8-in16k-out1k-50ms
              npucompile build qwen3.5-397b --deployment qwen35-397b-a3x8-in16k-out1k-50ms
              npucompile deployments --predict artifacts
    """
    if builds is not None:
        click.echo(built.report(map(_built, _artifacts(builds))), nl=False)
        return
    if predict is not None:
        predicted = predictions(predict, accepted)
        click.echo(json.dumps(as_data(predicted), indent=1) if as_json else as_markdown(predicted), nl=as_json)
        return
    rows = [deployment(name)] if name is not None else list(deployments().values())
    if model is not None:
        rows = _of_model(rows, model)
    if as_json:
        plain = [as_dict(row) for row in rows]
        click.echo(json.dumps(plain if name is None else plain[0], indent=1))
    else:
        click.echo("\n".join(table(rows) if name is None else details(rows[0])))


def predictions(directory: Path, accepted: float) -> Table:
    """The estimated decode step of each artifact in a directory, in the order of the published table.

    Raises:
        SpecError: there is no artifact, or one was built for no deployment, or has no bucket or GE graph of the published requests.
    """
    opened = _artifacts(directory)
    order = list(deployments())
    rows = []
    for artifact in sorted(opened, key=lambda artifact: order.index(prediction.named_row(artifact).id)):
        row = prediction.named_row(artifact)
        entry = prediction.bucket_of(row, artifact)
        rows.append(prediction.row_of(row, entry, step_cost(artifact, entry, prediction.context_of(row)), accepted))
    return prediction.table(rows, accepted)


def _artifacts(directory: Path) -> list[Artifact]:
    opened = [Artifact.open(manifest.parent) for manifest in sorted(directory.glob(f"*/{MANIFEST}"))]
    if not opened:
        raise SpecError(f"{directory} has no artifacts; build them with `npucompile build MODEL --deployment ID --out {directory}/ID`")
    return opened


def _built(artifact: Artifact) -> built.Built:
    row = prediction.named_row(artifact)
    context = built.context_for(row)
    graphs = [(entry, step_cost(artifact, entry, context)) for entry in artifact.manifest.graphs]
    return built.Built(row, built.phase_of(artifact), artifact, graphs)


def buildable(row: Deployment) -> bool:
    """Whether a row has a preset and a published launch command."""
    return not why_not(row)


def as_dict(row: Deployment) -> dict[str, Any]:
    """A row as plain values, with what a build derives from it."""
    fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "phases"}
    phases = {name: _phase_dict(row, phase) for name, phase in row.phases.items()}
    chunk, prompts = (prefill_chunk(row), prefill_sizes(row)[-1].prompts) if row.phases else (None, None)
    sizes = {"nodes": row.nodes, "npus": row.npus, "prefill_chunk": chunk, "prefill_prompts": prompts}
    return {**fields, **sizes, "buildable": buildable(row), "why": why_not(row), "phases": phases}


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
        shown += ["", f"* the default of its model; build another by its id: {_build_line(named)}"]
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
    return [*lines, "", f"build it: {_build_line(row)}" if buildable(row) else f"{NOT_BUILT}: {why_not(row)}"]


def _phase_lines(row: Deployment, phase: Phase) -> list[str]:
    limits = limits_for(row, phase, target(row.target).page_size)
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
        lines += [f"  differs       {line}" for line in deviations(row, phase, source_of(row))]
    if phase.mem_fraction is not None:
        lines.append(f"  memory        published share for weights and pools {phase.mem_fraction}")
    return lines


def _phase_dict(row: Deployment, phase: Phase) -> dict[str, Any]:
    fields = {f.name: getattr(phase, f.name) for f in dataclasses.fields(phase) if f.name != "name"}
    limits = dataclasses.asdict(limits_for(row, phase, target(row.target).page_size))
    different = list(deviations(row, phase, source_of(row))) if buildable(row) else []
    sizes = {"mesh": str(phase.mesh), "buckets": list(phase.buckets), "group_requests": phase.group_requests, "limits": limits}
    return {**fields, **sizes, "deviations": different}


def _cells(row: Deployment) -> tuple[str, ...]:
    phases = row.phases.values()
    buckets = next((format_buckets(phase.buckets) for phase in phases if phase.buckets), "-")
    meshes = " ".join(f"{name[0].upper()}:{phase.mesh}" if name != "mixed" else str(phase.mesh) for name, phase in row.phases.items())
    traffic = f"{row.input_len}/{row.output_len}" if row.input_len is not None else "-"
    name = row.id + ("*" if DEFAULT.get(row.model) == row.id else "")
    return name, row.model, row.target, meshes or "-", row.quantization, traffic, str(row.num_speculative_tokens), buckets


def _of_model(rows: list[Deployment], model: str) -> list[Deployment]:
    matching = [row for row in rows if row.model == model]
    if matching:
        return matching
    models = tuple(dict.fromkeys(row.model for row in rows))
    near = difflib.get_close_matches(model.lower(), models, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise SpecError(f"no deployment is of model {model!r}{hint}; legal are {', '.join(models)}")


def _build_line(row: Deployment) -> str:
    return f"npucompile build {row.model} --deployment {row.id}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _known(label: str, value: object) -> str:
    return "" if value is None else f"{label}{value}"
