"""`npucompile inspect`: shows an artifact as tables, graph texts or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import SpecError
from ...graphs.types import DTYPE_NAMES, Leaf
from ...lowering.artifact.artifact import Artifact, GraphEntry, Manifest
from ..build.memory import GIB
from ..build.stages import STAGES, unpack_texts
from ..cli import Home
from ..inspection import cost, flame, legality, views
from ..locate import artifact_path

SHOWN = (*STAGES, views.GE, views.ACL)


@click.command("inspect")
@click.argument("artifact", required=False)
@click.option("--bucket", help="One bucket: its name, or the batch size of a decode bucket.")
@click.option(
    "--stage",
    type=click.Choice(SHOWN),
    help="Print a bucket's graph at this stage; ge or aclgraph is the one an NPU runs.",
)
@click.option("--collectives", is_flag=True, help="Print the ordered collectives of each bucket and check them for deadlocks.")
@click.option("--memory", is_flag=True, help="Print the memory plan of one rank.")
@click.option("--environment", is_flag=True, help="Print the environment variables of the ranks: value and reason.")
@click.option("--census", is_flag=True, help="Print operator counts, costs and a roofline estimate.")
@click.option("--cost", "costs", is_flag=True, help="Print the estimated time of a step by layer, cause and operator.")
@click.option("--assumptions", is_flag=True, help="Print what is assumed of CANN's operators without a public source.")
@click.option("--context", type=int, metavar="N", help="Cached tokens of each request for --cost.  [default: half of the longest]")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also draw --cost as nested rectangles into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; without another option, everything but graphs.")
@click.pass_obj
def command(
    home: Home,
    artifact: str | None,
    bucket: str | None,
    stage: str | None,
    collectives: bool,
    memory: bool,
    environment: bool,
    census: bool,
    costs: bool,
    assumptions: bool,
    context: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Show ARTIFACT: a directory or the name of a built model, by default the newest artifact.

    \b
    Examples: npucompile inspect qwen3.5-tiny --bucket 4 --stage partitioned
              npucompile inspect qwen3.5-397b --bucket 8 --collectives
              npucompile inspect qwen3.5-397b --bucket 32 --cost --html step.html
    """
    modes = {"--stage": bool(stage), "--collectives": collectives, "--memory": memory, "--environment": environment, "--census": census}
    modes |= {"--cost": costs, "--assumptions": assumptions}
    if sum(modes.values()) > 1:
        together = " and ".join(name for name, is_set in modes.items() if is_set)
        raise SpecError(f"{together} are given together; legal is one of {', '.join(modes)}")
    if (context is not None or html) and not costs:
        raise SpecError(f"{'--context' if context is not None else '--html'} is given without --cost, which it is for")
    opened = Artifact.open(artifact_path(home.artifacts, artifact))
    manifest = opened.manifest
    entries = [find(manifest, bucket)] if bucket is not None else list(manifest.graphs)
    if stage:
        if bucket is None:
            raise SpecError(f"--stage prints one graph; name it with --bucket, one of {', '.join(e.bucket.name for e in manifest.graphs)}")
        show([_stage(opened, entries[0], stage)], as_json, one=True)
    elif collectives:
        show([views.collectives(opened, entry) for entry in entries], as_json, one=bucket is not None)
    elif census:
        show([views.census(opened, entry) for entry in entries], as_json, one=bucket is not None)
    elif costs:
        show([cost.view(opened, entry, context) for entry in entries], as_json, one=bucket is not None)
        if html:
            pictures = {entry.bucket.name: cost.step_cost(opened, entry, context) for entry in entries}
            html.write_text(flame.page(f"Time of a step: {opened.path.name}", pictures), encoding="utf-8")
    elif assumptions:
        show([legality.assumed(opened, entries)], as_json, one=True)
    elif memory:
        show([views.memory(manifest)], as_json, one=True)
    elif environment:
        show([views.environment(manifest)], as_json, one=True)
    elif as_json:
        click.echo(json.dumps(as_dict(opened, entries, costs=bucket is not None), indent=1))
    else:
        click.echo("\n".join([*table(opened, entries), *(signature(entries[0]) if bucket is not None else ())]))


def show(shown: list[views.View], as_json: bool, *, one: bool) -> None:
    """Prints views one after the other; as JSON a list of them, or the only one."""
    if as_json:
        data = [view.data for view in shown]
        click.echo(json.dumps(data[0] if one else data))
    else:
        click.echo("\n\n".join("\n".join(view.lines) for view in shown))


def _stage(artifact: Artifact, entry: GraphEntry, stage: str) -> views.View:
    if stage in (views.GE, views.ACL) and (entry.compiled is None or entry.compiled.backend not in {views.GE, views.ACL} - {stage}):
        return views.ge_graph(artifact, entry)
    text = stage_text(artifact, entry, stage)
    return views.View({"bucket": entry.bucket.name, "stage": stage, "text": text}, tuple(text.splitlines()))


def find(manifest: Manifest, name: str) -> GraphEntry:
    """The entry of a bucket, by its name or its decode batch size.

    Raises:
        SpecError: naming the artifact's buckets.
    """
    for entry in manifest.graphs:
        if name == entry.bucket.name or (entry.bucket.kind == "decode" and name == str(entry.bucket.batch)):
            return entry
    raise SpecError(f"no bucket {name!r}; the artifact has {', '.join(e.bucket.name for e in manifest.graphs)}")


def stage_text(artifact: Artifact, entry: GraphEntry, stage: str) -> str:
    """The stored text of a bucket's graph at one stage.

    Raises:
        SpecError: naming the stages it has.
    """
    texts = unpack_texts((artifact.path / entry.stages).read_bytes())
    if stage not in texts:
        stages = [name for name in SHOWN if name in texts or (entry.compiled and entry.compiled.backend == name)]
        raise SpecError(f"{entry.bucket.name} has no stage {stage!r} on mesh {artifact.manifest.mesh}; it has {', '.join(stages)}")
    return texts[stage]


def runs_on(manifest: Manifest, entry: GraphEntry) -> str:
    """Name of the backend that a bucket runs on now; "null" if it cannot run."""
    return "null" if manifest.backend == "null" or (entry.eager is None and entry.compiled is None) else entry.backend


def as_dict(artifact: Artifact, entries: list[GraphEntry], *, costs: bool = False) -> dict[str, Any]:
    """A manifest as plain values, with parameters and state as totals.

    Args:
        costs: add what is computed from each bucket's GE graph, see `cost.bucket_facts`; it takes a second a graph.
    """
    manifest = artifact.manifest
    model = {**manifest.model, "config": json.loads(manifest.model["config"])}
    if "family_file" in model:
        model["family_file"] = {name: value for name, value in model["family_file"].items() if name != "text"}
    return {
        "artifact": str(artifact.path),
        "digest": artifact.digest,
        "model": model,
        "dtype": manifest.dtype,
        "mesh": manifest.mesh,
        "target": manifest.target,
        "backend": manifest.backend,
        "deployment": manifest.deployment,
        "weights": manifest.weights or manifest.checkpoint,
        "quantization": manifest.quantization,
        "limits": {name: getattr(manifest.limits, name) for name in manifest.limits.__dataclass_fields__},
        "max_logprobs": max(entry.max_logprobs for entry in manifest.graphs),
        "memory": {
            "params_bytes": sum(leaf.aval.nbytes for leaf in manifest.params),
            "state_bytes": sum(leaf.aval.nbytes for leaf in manifest.state),
            "peak_bytes": max(entry.memory["peak_bytes"] for entry in manifest.graphs),
        },
        "toolchain": dict(manifest.toolchain),
        "cpu_features": list(manifest.cpu_features),
        "source_digest": manifest.source_digest,
        "buckets": [
            {
                "name": entry.bucket.name,
                "kind": entry.bucket.kind,
                "batch": entry.bucket.batch,
                "q_len": entry.bucket.q_len,
                "backend": runs_on(manifest, entry),
                "digest": entry.digest,
                "inputs": _types(entry.inputs),
                "outputs": _types(entry.outputs),
                "cost": dict(entry.cost),
                "memory": dict(entry.memory),
                "collectives": [list(c) for c in entry.collectives],
                "verified": dict(entry.verified),
                "census": dict(entry.census),
            }
            | (cost.bucket_facts(artifact, entry) | legality.illegal(artifact, entry) if costs else {})
            for entry in entries
        ],
    }


def table(artifact: Artifact, entries: list[GraphEntry]) -> list[str]:
    """A summary of the artifact, and a line per bucket."""
    facts = as_dict(artifact, entries)
    model, memory, limits, most = facts["model"], facts["memory"], artifact.manifest.limits, facts["max_logprobs"]
    scheme = f", {facts['quantization']}" if facts["quantization"] != "none" else ""
    lines = [
        f"{model['name']} ({model['family']}) for {facts['target']}, {facts['dtype']}{scheme}, mesh {facts['mesh']}   {artifact.path}",
        *([f"family of {own['path']}, sha256 {own['sha256'][:16]}"] if (own := model.get("family_file")) else []),
        *([f"deployment {facts['deployment']}"] if facts["deployment"] else []),
        f"context {limits.max_model_len}, {limits.num_pages - 1} pages of {limits.page_size} tokens, {limits.num_slots - 1} state slots, "
        f"requests in flight: {limits.num_request_slots - 1}",
        f"drafts a step: {limits.drafts}; log probabilities: {f'of up to {most} most likely tokens' if most else 'none'}",
        _memory_line(artifact.manifest, memory),
        "toolchain: " + ", ".join(f"{k} {v}" for k, v in sorted(facts["toolchain"].items())),
        "",
        f"{'bucket':<20} {'backend':<9} {'MFLOP':>12} {'MB read':>9} {'MB peak':>8}  {'proved within':<14} digest",
    ]
    for entry in entries:
        proof = f"{entry.verified['logits_error']:.1e}" if "logits_error" in entry.verified else "-"
        flops, read, peak = entry.cost["flops"] / 1e6, entry.cost["read_bytes"] / 1e6, entry.memory["peak_bytes"] / 1e6
        numbers = f"{flops:>12,.1f} {read:>9,.2f} {peak:>8,.2f}"
        lines.append(f"{entry.bucket.name:<20} {runs_on(artifact.manifest, entry):<9} {numbers}  {proof:<14} {entry.digest[:12]}")
    return lines


def signature(entry: GraphEntry) -> list[str]:
    """Inputs and outputs of a bucket's step, parameters and state excepted."""
    types_by_part = {"inputs": _types(entry.inputs), "outputs": _types(entry.outputs)}
    return ["", *(f"{part:<8} {', '.join(f'{name} {kind}' for name, kind in types.items())}" for part, types in types_by_part.items())]


def _types(leaves: Sequence[Leaf]) -> dict[str, str]:
    kinds = {leaf.path: leaf.aval for leaf in leaves}
    return {name: f"{DTYPE_NAMES[aval.dtype]}[{','.join(map(str, aval.shape))}]" for name, aval in kinds.items()}


def _memory_line(manifest: Manifest, memory: dict[str, int]) -> str:
    """The total of the memory plan; without a plan, the totals of weights, state and activations."""
    if manifest.memory:
        total, limit = manifest.memory["total_bytes"] / GIB, manifest.memory["limit_bytes"] / GIB
        return f"memory of a rank: {total:,.1f} of {limit:,.1f} GiB (--memory shows its parts)"
    return (
        f"memory: weights {memory['params_bytes'] / 1e6:,.1f} MB, state {memory['state_bytes'] / 1e6:,.1f} MB, "
        f"activations at most {memory['peak_bytes'] / 1e6:,.1f} MB"
    )
