"""Turns a plan into an artifact: first the eager one, which can serve at once, then its executables, each proved equal."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save

from ...graphs import tree
from ...graphs.ir.trace import signature_of
from ...graphs.types import DTYPE_NAMES, Leaf
from ...lowering.artifact.artifact import Artifact, ArtifactWriter, Compiled, GraphEntry, Manifest, graph_key
from ...lowering.artifact.graph_io import encode
from ...lowering.backend import backend
from ...lowering.toolchain import toolchain
from ...models import checkpoint, safetensors_files, step
from ...server.tokenizer import TextTokenizer
from ..progress import Progress
from ..verify import executables
from .compile_pool import Job, run_all
from .plan import Plan
from .result import Report
from .stages import Staged, stage

THREADS = 0
"""Compiled code asks the process for its thread count, so that one artifact serves machines of any size."""


def build(plan: Plan, out: Path, cache_dir: Path, progress: Progress, *, jobs: int = 2, patience: int = 0) -> Report:
    """Builds the artifact at `out`, or brings it up to date.

    Only graphs whose key (lowered graph, backend, options, toolchain) changed are compiled. A refused build leaves what was
    there before, or nothing; one that is interrupted goes on where it was.

    Args:
        cache_dir: what compilers keep between builds.
        jobs: processes that compile at a time.
        patience: niceness of those processes.

    Raises:
        NpucompileError: naming what cannot be built.
    """
    began = time.monotonic()
    backend(plan.backend).check_target()
    with ArtifactWriter(out) as writer:
        # Before minutes of tracing: a checkpoint that cannot be used.
        described = _describe(plan, writer, progress)
        staged = _stage_all(plan, progress)
        manifest = _with_graphs(plan, described, staged, writer)
        made = {entry.bucket: entry.compiled for entry in manifest.graphs if entry.compiled}
        # What was proved with other weights is not served before it is proved with these.
        manifest = writer.publish(replace(manifest, graphs=tuple(e if e.verified else replace(e, compiled=None) for e in manifest.graphs)))
        ready_seconds = time.monotonic() - began
        unproved = [replace(e, compiled=made[e.bucket]) for e in manifest.graphs if e.bucket in made and not e.compiled]
        for entry in unproved:
            manifest = _prove(entry, manifest, writer)
            progress.say(f"verified {entry.bucket.name} with the new weights")
        reused = tuple(entry.bucket.name for entry in manifest.graphs if entry.compiled)
        pending = len(manifest.graphs) - len(reused)
        seconds: dict[str, float] = {}
        if pending and backend(plan.backend).compile and plan.backend != "eager":
            progress.say(f"{out} can serve ({ready_seconds:.1f} s); compiling {pending} of {len(manifest.graphs)} buckets for speed")
            seconds, manifest = _compile(plan, manifest, {s.bucket.name: s for s in staged}, writer, cache_dir, progress, jobs, patience)
        writer.collect(manifest)
    return Report(out, time.monotonic() - began, ready_seconds, seconds, reused)


def _stage_all(plan: Plan, progress: Progress) -> list[Staged]:
    staged = []
    buckets = (*plan.buckets, *plan.references)
    with progress.bar("trace, partition, lower", len(buckets)) as bar:
        for bucket in buckets:
            staged.append(stage(plan, bucket))
            bar.step(bucket.name)
    return staged


def _describe(plan: Plan, writer: ArtifactWriter, progress: Progress) -> Manifest:
    """Stores weights and tokenizer; the manifest has no graphs yet."""
    signature = signature_of(step.program(plan.model, plan.buckets[0], plan.limits, plan.dtype))
    weights, source = _weights(plan, signature.params, writer, progress)
    tokenizer = None
    if plan.found.tokenizer:
        TextTokenizer.load(plan.found.tokenizer)  # a file that cannot be used is refused here, not by the server
        tokenizer = writer.add("tokenizer", plan.found.tokenizer.read_bytes(), "json")
    return Manifest(
        model={
            "name": plan.found.name,
            "family": plan.model.family.FAMILY,
            "config": plan.found.text,
            "vocab_size": int(plan.model.config.vocab_size),
            "eos_ids": list(plan.eos_ids),
        },
        dtype=DTYPE_NAMES[plan.dtype],
        mesh=str(plan.mesh),
        rules=dict(plan.rules().table),
        target=plan.backend,
        limits=plan.limits,
        params=signature.params,
        state=signature.state,
        graphs=(),
        references=(),
        weights=weights,
        tokenizer=tokenizer,
        files={},
        toolchain=toolchain(),
        cpu_features=backend(plan.backend).cpu_features(),
        source_digest=source,
        build_arguments=plan.arguments,
        quantization=plan.quantization,
        deployment=plan.deployment,
    )


def _with_graphs(plan: Plan, described: Manifest, staged: list[Staged], writer: ArtifactWriter) -> Manifest:
    """Stores eager graphs; the manifest has them, and the executables of the previous artifact that still fit."""
    entries = [_entry(plan, one, described, writer) for one in staged]
    served, references = entries[: len(plan.buckets)], entries[len(plan.buckets) :]
    return replace(described, graphs=tuple(served), references=tuple(replace(e, compiled=None, verified={}) for e in references))


def _entry(plan: Plan, one: Staged, manifest: Manifest, writer: ArtifactWriter) -> GraphEntry:
    assert one.eager is not None
    key = graph_key(one.texts["lowered"], plan.backend, backend(plan.backend).options(THREADS), manifest.toolchain)
    eager = writer.add("graphs", encode(one.eager.graph), "graph")
    compiled, verified = _previous(writer, manifest, one.bucket.name, key, eager)
    stages = zlib.compress(json.dumps(one.texts, sort_keys=True).encode(), 9)
    return GraphEntry(
        bucket=one.bucket,
        inputs=one.partitioned.signature.inputs,
        outputs=one.partitioned.signature.outputs,
        eager=eager,
        stages=writer.add("stages", stages, "json.z"),
        digest=key,
        compiled=compiled,
        cost=one.cost,
        memory=one.memory,
        collectives=one.partitioned.collectives,
        verified=verified,
    )


def _previous(writer: ArtifactWriter, manifest: Manifest, name: str, key: str, eager: str) -> tuple[Compiled | None, Mapping[str, float]]:
    """The executable of that key in the previous artifact, and its proof while weights and reference are those it was made with."""
    before = writer.previous.manifest if writer.previous else None
    for entry in before.graphs if before else ():
        made = entry.compiled
        if before and entry.bucket.name == name and made and made.key == key and writer.keep(made.file):
            return made, entry.verified if (before.weights, entry.eager) == (manifest.weights, eager) else {}
    return None, {}


def _prove(entry: GraphEntry, manifest: Manifest, writer: ArtifactWriter) -> Manifest:
    """Publishes an executable that equals the reference.

    Raises:
        VerifyError: it does not.
    """
    entry = replace(entry, verified=executables.verify_entry(Artifact(writer.root, manifest, ""), entry))
    return writer.publish(replace(manifest, graphs=tuple(entry if e.bucket == entry.bucket else e for e in manifest.graphs)))


def _weights(plan: Plan, leaves: tuple[Leaf, ...], writer: ArtifactWriter, progress: Progress) -> tuple[str | None, str]:
    """Path of the parameters in the artifact, and the digest of what they were read from."""
    if plan.found.checkpoint_dir is None:
        return None, "none"
    source = safetensors_files.open_checkpoint(plan.found.checkpoint_dir)
    digest = safetensors_files.digest(source)
    before = writer.previous.manifest if writer.previous else None
    if before and before.weights and before.source_digest == digest and before.params == leaves and writer.keep(before.weights):
        return before.weights, digest
    params = checkpoint.load(source, plan.model.params(plan.dtype))
    tensors = {leaf.name: tensor.contiguous() for leaf, (_, tensor) in zip(leaves, tree.flatten(params), strict=True)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    progress.say(f"read {size / 1e6:.1f} MB of {DTYPE_NAMES[plan.dtype]} weights from {source.directory}")
    return writer.add("weights", save(tensors), "safetensors"), digest


def _compile(
    plan: Plan,
    manifest: Manifest,
    staged: Mapping[str, Staged],
    writer: ArtifactWriter,
    cache_dir: Path,
    progress: Progress,
    jobs: int,
    patience: int,
) -> tuple[dict[str, float], Manifest]:
    """Compiles, proves and publishes one executable after the other, in the order users feel them."""
    made = backend(plan.backend)
    scratch = writer.root / "graphs"
    todo = []
    for entry in sorted((e for e in manifest.graphs if e.compiled is None), key=lambda e: (e.bucket.kind != "decode", e.bucket.tokens)):
        target = staged[entry.bucket.name].target
        assert target is not None
        part = scratch / f".{entry.bucket.name}.{made.suffix}"
        todo.append(Job(entry.bucket.name, encode(target.graph), target.signature, made.name, part, cache_dir, THREADS, patience))
    seconds: dict[str, float] = {}
    with progress.bar(f"compile and verify ({made.name})", len(todo)) as bar:
        for done in run_all(todo, jobs):
            file = writer.add("graphs", done.job.out_path.read_bytes(), made.suffix)
            done.job.out_path.unlink()
            entry = next(e for e in manifest.graphs if e.bucket.name == done.job.name)
            manifest = _prove(replace(entry, compiled=Compiled(made.name, file, entry.digest)), manifest, writer)
            seconds[done.job.name] = done.seconds
            error = next(e.verified["logits_error"] for e in manifest.graphs if e.bucket == entry.bucket)
            bar.step(f"{done.job.name} {done.seconds:.1f} s, logits within {error:.1e}")
    return seconds, manifest
