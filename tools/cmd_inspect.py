"""Turns `npucompile inspect` into tables, graph texts or JSON."""

from __future__ import annotations

import json
import zlib
from typing import Any

import click

from ..graphs.errors import SpecError
from ..lowering.artifact import Artifact, GraphEntry, Manifest
from .cli import Home
from .locate import artifact_path
from .stages import STAGES


@click.command("inspect")
@click.argument("artifact", required=False)
@click.option("--bucket", help="One bucket: its name, or the batch of a decode bucket.")
@click.option("--stage", type=click.Choice(STAGES), help="Print a bucket's graph at this stage.")
@click.option("--json", "as_json", is_flag=True, help="Print everything but graphs as JSON.")
@click.pass_obj
def command(home: Home, artifact: str | None, bucket: str | None, stage: str | None, as_json: bool) -> None:
    """Show ARTIFACT (a directory or a built model's name; the newest when none is given).

    Example: npucompile inspect qwen3.5-tiny --bucket 4 --stage partitioned
    """
    opened = Artifact.open(artifact_path(home.artifacts, artifact))
    manifest = opened.manifest
    entries = [find(manifest, bucket)] if bucket is not None else list(manifest.graphs)
    if stage:
        if bucket is None:
            raise SpecError(f"--stage prints one graph; name it with --bucket, one of {', '.join(e.bucket.name for e in manifest.graphs)}")
        click.echo(stage_text(opened, entries[0], stage), nl=False)
    elif as_json:
        click.echo(json.dumps(as_dict(opened, entries), indent=1))
    else:
        click.echo("\n".join(table(opened, entries)))


def find(manifest: Manifest, wanted: str) -> GraphEntry:
    """The entry of a bucket given by name or by decode batch.

    Raises:
        SpecError: naming the buckets there are.
    """
    for entry in manifest.graphs:
        if wanted == entry.bucket.name or (entry.bucket.kind == "decode" and wanted == str(entry.bucket.batch)):
            return entry
    raise SpecError(f"no bucket {wanted!r}; the artifact has {', '.join(e.bucket.name for e in manifest.graphs)}")


def stage_text(artifact: Artifact, entry: GraphEntry, stage: str) -> str:
    """The stored text of a graph at one stage."""
    texts: dict[str, str] = json.loads(zlib.decompress((artifact.path / entry.stages).read_bytes()))
    return texts[stage]


def runs_on(manifest: Manifest, entry: GraphEntry) -> str:
    """Name of the backend a bucket runs on now; "null" where the artifact is not made to run."""
    return manifest.target if manifest.target == "null" else entry.backend


def as_dict(artifact: Artifact, entries: list[GraphEntry]) -> dict[str, Any]:
    """All of a manifest that is not operand by operand."""
    manifest = artifact.manifest
    model = {k: v for k, v in manifest.model.items() if k != "config"} | {"config": json.loads(manifest.model["config"])}
    return {
        "artifact": str(artifact.path),
        "digest": artifact.digest,
        "model": model,
        "dtype": manifest.dtype,
        "mesh": manifest.mesh,
        "target": manifest.target,
        "limits": {name: getattr(manifest.limits, name) for name in manifest.limits.__dataclass_fields__},
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
                "cost": dict(entry.cost),
                "memory": dict(entry.memory),
                "collectives": [list(c) for c in entry.collectives],
                "verified": dict(entry.verified),
            }
            for entry in entries
        ],
    }


def table(artifact: Artifact, entries: list[GraphEntry]) -> list[str]:
    """What a person wants to see first."""
    told = as_dict(artifact, entries)
    model, memory, limits = told["model"], told["memory"], artifact.manifest.limits
    lines = [
        f"{model['name']} ({model['family']}) for {told['target']}, {told['dtype']}, mesh {told['mesh']}   {artifact.path}",
        f"context {limits.max_model_len}, {limits.num_pages - 1} pages of {limits.page_size} tokens, {limits.num_slots - 1} state slots",
        f"memory: weights {memory['params_bytes'] / 1e6:,.1f} MB, state {memory['state_bytes'] / 1e6:,.1f} MB, "
        f"activations at most {memory['peak_bytes'] / 1e6:,.1f} MB",
        "toolchain: " + ", ".join(f"{k} {v}" for k, v in sorted(told["toolchain"].items())),
        "",
        f"{'bucket':<20} {'backend':<9} {'MFLOP':>9} {'MB read':>9} {'MB peak':>8}  {'proved within':<14} digest",
    ]
    for entry in entries:
        proof = f"{entry.verified['logits_error']:.1e}" if entry.verified else "-"
        flops, read, peak = entry.cost["flops"] / 1e6, entry.cost["read_bytes"] / 1e6, entry.memory["peak_bytes"] / 1e6
        numbers = f"{flops:>9,.1f} {read:>9,.2f} {peak:>8,.2f}"
        lines.append(f"{entry.bucket.name:<20} {runs_on(artifact.manifest, entry):<9} {numbers}  {proof:<14} {entry.digest[:12]}")
    return lines
