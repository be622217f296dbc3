"""Turns a plan for NPUs into an artifact: GE graphs, certificates and a memory plan; no device, no weights, nothing that runs here."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ...graphs import cost
from ...graphs.ir.trace import signature_of
from ...graphs.types import DTYPE_NAMES, Bucket, Leaf, leaf_name
from ...lowering.artifact.artifact import ArtifactWriter, Compiled, GraphEntry, Manifest, graph_key
from ...lowering.backend import backend
from ...lowering.collectives_check import check_ranks, expand
from ...lowering.toolchain import toolchain
from ...models import step
from ..progress import Progress
from ..verify.small_model import share
from . import memory, source_digest
from .cache import Journal
from .device_pool import Done, Job, run_all
from .plan import Plan
from .result import Report
from .stages import partition_bucket


def build_device(plan: Plan, out: Path, cache_dir: Path, progress: Progress, *, jobs: int = 2) -> Report:
    """Builds the artifact at `out`, or brings it up to date: buckets whose plan did not change are taken over as they are.

    An interrupted build goes on where it was. A plan that does not fit a device's memory is refused, for its weights and pools
    before anything is lowered and for its activations after; what was there before stays.

    Args:
        cache_dir: what lowering keeps between builds, and the buckets of unfinished ones.
        jobs: processes at a time.

    Raises:
        NpucompileError: naming what cannot be built.
    """
    began = time.monotonic()
    backend(plan.backend).check_target()
    journal = Journal(cache_dir / "unfinished")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with ArtifactWriter(out) as writer, tempfile.TemporaryDirectory(dir=cache_dir, prefix="build-") as scratch:
        described = _describe(plan)
        if not _memory(plan, described, ()).fits:
            # What fits beside the activations is known once the largest graphs are.
            _memory(plan, described, _sketches(plan)).check()
        keys = {bucket: plan_key(plan, bucket) for bucket in plan.buckets}
        entries = {bucket: entry for bucket in plan.buckets if (entry := _previous(plan, writer, journal, bucket, keys[bucket]))}
        todo = [bucket for bucket in plan.buckets if bucket not in entries]
        reused, seconds = tuple(bucket.name for bucket in entries), dict[str, float]()
        with progress.bar(f"lower for {plan.target.name}", len(todo)) as bar:
            for done in run_all([Job(plan, bucket, Path(scratch) / bucket.name, cache_dir) for bucket in todo], jobs):
                bucket = done.job.bucket
                check_ranks(expand(done.collectives, plan.mesh))
                entries[bucket] = _entry(plan, done, keys[bucket], writer, journal, described.toolchain)
                seconds[bucket.name] = done.seconds
                bar.step(f"{bucket.name} {done.seconds:.1f} s, {sum(done.census.values())} operators")
        planned = _memory(plan, described, tuple(entries.values()))
        planned.check()
        graphs = tuple(entries[bucket] for bucket in plan.buckets)
        manifest = writer.publish(replace(described, graphs=graphs, memory=planned.as_dict()))
        writer.collect(manifest)
        journal.forget(list(keys.values()))
    took = time.monotonic() - began
    return Report(out, took, took, seconds, reused)


def plan_key(plan: Plan, bucket: Bucket) -> str:
    """Digest of everything that decides a bucket's graph: the sources of this package, the plan, the toolchain."""
    told = (
        source_digest.digest(),
        plan.found.name,
        plan.found.text,
        repr(plan.model.config),
        repr(bucket),
        repr(plan.limits),
        plan.max_logprobs,
        str(plan.dtype),
        str(plan.mesh),
        repr(plan.rules(bucket)),
        plan.backend,
        sorted(backend(plan.backend).options(0).items()),
        sorted(toolchain().items()),
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _describe(plan: Plan) -> Manifest:
    """The manifest without graphs."""
    signature = signature_of(step.program(plan.model, plan.buckets[0], plan.limits, plan.dtype))
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
        target=plan.target.name,
        limits=plan.limits,
        params=signature.params,
        state=signature.state,
        graphs=(),
        references=(),
        weights=None,
        tokenizer=None,
        files={},
        toolchain={**toolchain(), **{name: str(value) for name, value in backend(plan.backend).options(0).items()}},
        cpu_features=(),
        source_digest="none",
        build_arguments=plan.arguments,
        quantization=plan.quantization,
        deployment=plan.deployment,
    )


def _memory(plan: Plan, described: Manifest, entries: tuple[GraphEntry, ...]) -> memory.MemoryPlan:
    """What one device holds; without entries, of its weights, pools and communication alone."""
    config, ranks = plan.model.config, plan.mesh.size
    experts = getattr(config, "num_experts", 0)
    sent = max((tokens for tokens in _shares(plan) if tokens <= config.variant.most_dispatched), default=0)
    window = 0
    if experts and ranks > 1 and sent:
        window = memory.dispatch_window_bytes(plan.target, sent, config.hidden_size, experts, config.num_experts_per_tok, ranks)
    groups = {group for entry in entries for _, group, _ in entry.collectives} or {"tp", "world"}
    return memory.plan_memory(
        described.params,
        described.state,
        plan.mesh,
        plan.rules(),
        plan.target,
        plan.limits,
        peak_bytes=max((entry.memory["peak_bytes"] for entry in entries), default=0),
        inputs_bytes=max((_bytes((*entry.inputs, *entry.outputs)) for entry in entries), default=0),
        communicators=memory.communicators(plan.mesh, groups, window),
        draft=leaf_name("params", f"{plan.model.family.DRAFT}."),
    )


def _sketches(plan: Plan) -> tuple[GraphEntry, ...]:
    """The largest bucket of each kind, as far as it is known before it is lowered."""
    found = []
    for bucket in {bucket.kind: bucket for bucket in sorted(plan.buckets, key=lambda b: b.tokens)}.values():
        made = partition_bucket(plan, bucket)[1]
        peak, told = {"peak_bytes": cost.memory(made.graph, made.signature).peak_bytes}, made.signature
        found.append(GraphEntry(bucket, told.inputs, told.outputs, None, "", "", None, {}, peak, made.collectives, {}))
    return tuple(found)


def _shares(plan: Plan) -> Iterator[int]:
    """Tokens of one rank in every pass over layers: the model's, and the draft head's over one token a row."""
    for bucket in plan.buckets:
        for tokens in (bucket.tokens, *((bucket.batch,) if plan.limits.drafts else ())):
            yield share(bucket, tokens, plan.mesh.axis("tp"))


def _bytes(leaves: tuple[Leaf, ...]) -> int:
    return sum(leaf.aval.nbytes for leaf in leaves)


def _entry(plan: Plan, done: Done, key: str, writer: ArtifactWriter, journal: Journal, versions: Mapping[str, str]) -> GraphEntry:
    made = backend(plan.backend)
    digest = graph_key(done.lowered, plan.backend, made.options(0), versions)
    graph = done.job.out_path.read_bytes() if made.compile else b""
    compiled = Compiled(made.name, writer.add("graphs", graph, made.suffix), digest) if made.compile else None
    entry = GraphEntry(
        bucket=done.job.bucket,
        inputs=done.inputs,
        outputs=done.outputs,
        eager=None,
        stages=writer.add("stages", done.stages, "json.z"),
        digest=digest,
        compiled=compiled,
        cost=done.cost,
        memory=done.memory,
        collectives=done.collectives,
        verified={},
        plan=key,
        census=done.census,
    )
    journal.keep(entry, done.stages, graph)
    return entry


def _previous(plan: Plan, writer: ArtifactWriter, journal: Journal, bucket: Bucket, key: str) -> GraphEntry | None:
    """The bucket's entry in the previous artifact, while its plan is this one and its files are unharmed; or an unfinished build's."""
    for entry in writer.previous.manifest.graphs if writer.previous else ():
        files = (entry.stages, *((entry.compiled.file,) if entry.compiled else ()))
        if entry.bucket == bucket and entry.plan == key and all([writer.keep(name) for name in files]):
            return entry
    return journal.take(key, writer, backend(plan.backend).suffix)
