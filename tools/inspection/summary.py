"""The summary of an artifact, which `npucompile inspect` shows without a view: its manifest as plain values and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import DTYPE_NAMES, Leaf
from ...lowering.artifact.artifact import Artifact, GraphEntry, Manifest
from ..builder.memory import GIB
from ..builder.stages import STAGES, unpack_texts
from . import cost, legality, views

SHOWN = (*STAGES, views.GE, views.ACL)
"""Stages of which a bucket's graph can be shown."""


def find(manifest: Manifest, name: str) -> GraphEntry:
    """The entry of a bucket, by its name or its decode batch size.

    Raises:
        SpecError: naming the artifact's buckets.
    """
    for entry in manifest.graphs:
        if views.is_named(entry, name):
            return entry
    raise SpecError(f"no bucket {name!r}; the artifact has {', '.join(e.bucket.name for e in manifest.graphs)}")


def stage(artifact: Artifact, entry: GraphEntry, name: str) -> views.InspectView:
    """A bucket's graph at one stage, as it was stored.

    Raises:
        SpecError: naming the stages it has.
    """
    if name in (views.GE, views.ACL) and (entry.compiled is None or entry.compiled.backend not in {views.GE, views.ACL} - {name}):
        return views.ge_graph(artifact, entry)
    texts = unpack_texts((artifact.path / entry.stages).read_bytes())
    if name not in texts:
        stages = [other for other in SHOWN if other in texts or (entry.compiled and entry.compiled.backend == other)]
        raise SpecError(f"{entry.bucket.name} has no stage {name!r} on mesh {artifact.manifest.mesh}; it has {', '.join(stages)}")
    return views.InspectView({"bucket": entry.bucket.name, "stage": name, "text": texts[name]}, tuple(texts[name].splitlines()))


def runs_on(manifest: Manifest, entry: GraphEntry) -> str:
    """Name of the backend that a bucket runs on now; "null" if it cannot run."""
    return "null" if manifest.backend == "null" or (entry.eager is None and entry.compiled is None) else entry.backend


def as_dict(artifact: Artifact, entries: Sequence[GraphEntry], *, costs: bool = False) -> dict[str, Any]:
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
                "refused": entry.refused,
                "census": dict(entry.census),
            }
            | (cost.bucket_facts(artifact, entry) | legality.illegal(artifact, entry) if costs else {})
            for entry in entries
        ],
    }


ESTIMATED = 8
"""Buckets of a table of which it is estimated how long a step takes: it takes up to a second each."""


def table(artifact: Artifact, entries: Sequence[GraphEntry]) -> list[str]:
    """A summary of the artifact, and a line per bucket; of NPUs with the estimated time of a step and its launches."""
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
    ]
    some = entries[:: -(-len(entries) // ESTIMATED)]
    estimates = {entry.bucket: known for entry in some if (known := cost.bucket_facts(artifact, entry))}
    times = f" {'ms':>8} {'launches':>9}" if estimates else ""
    lines.append(f"{'bucket':<20} {'backend':<9}{times} {'MFLOP':>12} {'MB read':>9} {'MB peak':>8}  {'proved within':<14} digest")
    for entry in entries:
        proof = f"{entry.verified['logits_error']:.1e}" if "logits_error" in entry.verified else "-"
        flops, read, peak = entry.cost["flops"] / 1e6, entry.cost["read_bytes"] / 1e6, entry.memory["peak_bytes"] / 1e6
        estimate = estimates.get(entry.bucket)
        ms, launches = (f"{estimate['cost']['step_ms']:.2f}", f"{estimate['launches']:,}") if estimate else ("", "")
        numbers = f"{f' {ms:>8} {launches:>9}' if estimates else ''} {flops:>12,.1f} {read:>9,.2f} {peak:>8,.2f}"
        lines.append(f"{entry.bucket.name:<20} {runs_on(artifact.manifest, entry):<9}{numbers}  {proof:<14} {entry.digest[:12]}")
    if refused := [f"left out: {entry.refused}" for entry in entries if entry.refused]:
        lines += ["", *refused]
    if estimates:
        more = f", of {len(some)} of {len(entries)} buckets" if len(some) < len(entries) else ""
        lines += ["", f"ms and launches are estimates of a step{more}: --cost says where they go"]
    return lines


def signature(entry: GraphEntry) -> list[str]:
    """Inputs and outputs of a bucket's step, parameters and state excepted."""
    types_by_part = {"inputs": _types(entry.inputs), "outputs": _types(entry.outputs)}
    return ["", *(f"{part:<8} {', '.join(f'{name} {kind}' for name, kind in types.items())}" for part, types in types_by_part.items())]


def _types(leaves: Sequence[Leaf]) -> dict[str, str]:
    kinds = {leaf.path: leaf.aval for leaf in leaves}
    return {name: f"{DTYPE_NAMES[aval.dtype]}[{','.join(map(str, aval.shape))}]" for name, aval in kinds.items()}


def _memory_line(manifest: Manifest, memory: Mapping[str, int]) -> str:
    """The total of the memory plan; without a plan, the totals of weights, state and activations."""
    if manifest.memory:
        total, limit = manifest.memory["total_bytes"] / GIB, manifest.memory["limit_bytes"] / GIB
        return f"memory of a rank: {total:,.1f} of {limit:,.1f} GiB (--memory shows its parts)"
    return (
        f"memory: weights {memory['params_bytes'] / 1e6:,.1f} MB, state {memory['state_bytes'] / 1e6:,.1f} MB, "
        f"activations at most {memory['peak_bytes'] / 1e6:,.1f} MB"
    )
