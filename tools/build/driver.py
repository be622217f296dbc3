"""The build: from a plan to its artifact, for every target.

Where the target is this machine, the artifact can serve as soon as its buckets are staged, by their eager reference graphs; executables
are added as they are compiled, each after it was compared with that reference. For other targets every bucket is staged and compiled in
the pool, proved there without running it, and published when all are there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...graphs.errors import LoweringError
from ...graphs.types import Bucket, Signature
from ...lowering.artifact.artifact import Artifact, ArtifactWriter, GraphEntry, Manifest
from ...lowering.artifact.graph_io import encode
from ...lowering.artifact.manifest import Compiled as CompiledFile
from ...lowering.backend import Backend, backend
from ...lowering.collectives_check import check_ranks, expand
from ...lowering.toolchain import toolchain
from ..progress import Progress
from ..verify import executables
from .cache import UnfinishedBuild
from .describe import describe
from .plan import Plan
from .pool import THREADS, CompileJob, CompileResult, StagedRecord, record_of, run_all
from .rank_memory import check_before_lowering, rank_memory
from .stages import stage
from .stamp import bucket_stamp


@dataclass(frozen=True)
class BuildReport:
    """What a build did.

    Attributes:
        seconds: wall time of all of it.
        ready_seconds: wall time until the artifact could serve, uncompiled at least.
        compiled: bucket name to compile seconds, for graphs that were compiled now.
        reused: names of buckets whose executables were up to date.
    """

    path: Path
    seconds: float
    ready_seconds: float
    compiled: Mapping[str, float]
    reused: tuple[str, ...]


def build(plan: Plan, out: Path, cache_dir: Path, progress: Progress, *, jobs: int = 2, nice: int = 0) -> BuildReport:
    """Builds the artifact at `out`, or brings it up to date.

    A bucket whose stamp is that of the previous artifact is taken over as it is; another one is staged, and compiled only if its key
    (lowered graph, backend, options, toolchain) changed. A refused build leaves what was there before, or nothing; one that is
    interrupted goes on where it was.

    Args:
        cache_dir: what compilers keep between builds, and the buckets of unfinished ones.
        jobs: processes that compile at a time.
        nice: niceness of those processes.

    Raises:
        NpucompileError: naming what cannot be built.
    """
    began = time.monotonic()
    if reason := backend(plan.backend).compiles_here():
        raise LoweringError(reason)
    with ArtifactWriter(out) as writer:
        # Before minutes of tracing: a checkpoint that cannot be used.
        manifest = describe(plan, writer, progress)
        cache_dir.mkdir(parents=True, exist_ok=True)
        return _Build(plan, writer, manifest, progress, cache_dir, jobs, nice, began).run(out)


def facts(plan: Plan, bucket: Bucket) -> tuple[object, ...]:
    """Everything that decides a bucket's graph, besides the sources of this package."""
    chosen = backend(plan.backend)
    return (
        plan.source.name,
        plan.source.text,
        repr(plan.model.config),
        repr(bucket),
        repr(plan.limits),
        plan.max_logprobs,
        str(plan.dtype),
        str(plan.mesh),
        repr(plan.rules(bucket)),
        plan.backend,
        sorted(chosen.options(THREADS).items()),
        sorted({**toolchain(), **chosen.versions()}.items()),
    )


@dataclass
class _Build:
    """One build under way: what has become of each bucket so far."""

    plan: Plan
    writer: ArtifactWriter
    manifest: Manifest
    progress: Progress
    cache_dir: Path
    jobs: int
    nice: int
    began: float
    entries: dict[Bucket, GraphEntry] = field(default_factory=dict)
    lowered: dict[Bucket, tuple[bytes, Signature]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    params: list[torch.Tensor] | None = None

    def run(self, out: Path) -> BuildReport:
        plan, local, began = self.plan, self.plan.target.local, self.began
        if not local:
            check_before_lowering(plan, self.manifest)
        self.unfinished = UnfinishedBuild(self.cache_dir / "unfinished")
        self.stamps = {bucket: bucket_stamp(*facts(plan, bucket)) for bucket in (*plan.buckets, *plan.references)}
        self._take_over()
        taken_over, ready_seconds = set(self.entries), 0.0
        if local:
            self._stage_here()
            self.publish()
            ready_seconds = time.monotonic() - began
            self._prove_reused()
        todo = [bucket for bucket in plan.buckets if not self._is_done(bucket)]
        reused = [bucket.name for bucket in plan.buckets if bucket not in todo and (bucket in taken_over or self.compiles)]
        if local and todo:
            self.progress.say(f"{out} can serve ({ready_seconds:.1f} s); compiling {len(todo)} of {len(plan.buckets)} buckets for speed")
        if todo:
            self._compile(todo)
        if not local:
            planned = rank_memory(plan, self.manifest, [self.entries[bucket] for bucket in plan.buckets])
            planned.check()
            self.manifest = replace(self.manifest, memory=planned.as_dict())
            self.publish()
        self.writer.collect(self.manifest)
        self.unfinished.forget(list(self.stamps.values()))
        seconds = time.monotonic() - began
        return BuildReport(out, seconds, ready_seconds or seconds, self.seconds, tuple(reused))

    @property
    def backend(self) -> Backend:
        """The plan's."""
        return backend(self.plan.backend)

    @property
    def compiles(self) -> bool:
        """Whether buckets get executables besides the reference."""
        return self.backend.suffix is not None and self.plan.backend != "eager"

    def publish(self) -> None:
        """Makes what is there the artifact's; an executable that is not proved with these weights is left out."""
        entries = {
            bucket: entry if entry.verified or not self.plan.target.local else replace(entry, compiled=None)
            for bucket, entry in self.entries.items()
        }
        graphs, references = (tuple(entries[bucket] for bucket in part) for part in (self.plan.buckets, self.plan.references))
        self.manifest = self.writer.publish(replace(self.manifest, graphs=graphs, references=references))

    def _is_done(self, bucket: Bucket) -> bool:
        entry = self.entries.get(bucket)
        return entry is not None and (entry.compiled is not None or not self.compiles or bucket not in self.plan.buckets)

    def _take_over(self) -> None:
        """Buckets of the previous artifact, or of an unfinished build, whose stamp is the same and whose files are unharmed."""
        before = self.writer.previous.manifest if self.writer.previous else None
        for entry in (*before.graphs, *before.references) if before else ():
            if self.stamps.get(entry.bucket) == entry.stamp and all([self.writer.keep(name) for name in entry.files]):
                proved = before is not None and before.weights == self.manifest.weights
                served = entry.bucket in self.plan.buckets
                entry = entry if served else replace(entry, compiled=None)
                self.entries[entry.bucket] = entry if proved and served else replace(entry, verified={})
        for bucket in self.plan.buckets if not self.plan.target.local else ():
            if bucket not in self.entries and (kept := self.unfinished.take(self.stamps[bucket], self.writer, str(self.backend.suffix))):
                self.entries[bucket] = kept

    def _stage_here(self) -> None:
        """Every bucket's eager graph, and executables of the previous artifact whose key is still that of their bucket."""
        todo = [bucket for bucket in self.stamps if not self._is_done(bucket)]
        with self.progress.bar("trace, partition, lower", len(todo)) as bar:
            for bucket in todo:
                staged = stage(self.plan, bucket)
                reference = staged.lowered if self.plan.backend == "eager" else backend("eager").lower(staged.partitioned)
                eager = self.writer.add("graphs", encode(reference.graph), "graph")
                entry = self._entry(bucket, record_of(self.plan, staged), eager)
                if bucket in self.plan.buckets:
                    entry = self._with_known(entry)
                    if self.compiles and entry.compiled is None:
                        self.lowered[bucket] = (encode(staged.lowered.graph), staged.lowered.signature)
                self.entries[bucket] = entry
                bar.step(bucket.name)

    def _entry(self, bucket: Bucket, staged: StagedRecord, eager: str | None) -> GraphEntry:
        return GraphEntry(
            bucket=bucket,
            inputs=staged.inputs,
            outputs=staged.outputs,
            eager=eager,
            stages=self.writer.add("stages", staged.texts, "json.z"),
            digest=staged.key,
            compiled=None,
            cost=staged.cost,
            memory=staged.memory,
            collectives=staged.collectives,
            verified={},
            stamp=self.stamps[bucket],
        )

    def _known(self, bucket: Bucket) -> GraphEntry | None:
        """The bucket in the previous artifact, where it has an executable."""
        before = self.writer.previous.manifest.graphs if self.writer.previous else ()
        return next((entry for entry in before if entry.bucket == bucket and entry.compiled), None)

    def _with_known(self, entry: GraphEntry) -> GraphEntry:
        """With the previous artifact's executable of the same key, and its proof while weights and reference are those it was made with."""
        known = self._known(entry.bucket)
        if known is None or known.compiled is None or known.compiled.key != entry.digest or not self.writer.keep(known.compiled.file):
            return entry
        before = self.writer.previous
        same = before is not None and (before.manifest.weights, known.eager) == (self.manifest.weights, entry.eager)
        return replace(entry, compiled=known.compiled, census=known.census, verified=known.verified if same else {})

    def _prove_reused(self) -> None:
        for bucket in self.plan.buckets:
            if self.entries[bucket].compiled and not self.entries[bucket].verified:
                self._prove(bucket)
                self.progress.say(f"verified {bucket.name} with the new weights")

    def _prove(self, bucket: Bucket) -> None:
        """Publishes an executable that equals the reference.

        Raises:
            VerifyError: it does not.
        """
        artifact = Artifact(self.writer.root, self.manifest, "")
        if self.params is None:
            self.params = executables.load_params(artifact)
        entry = self.entries[bucket]
        self.entries[bucket] = replace(entry, verified=executables.verify_entry(artifact, entry, self.params))
        self.publish()

    def _compile(self, todo: list[Bucket]) -> None:
        """Compiles and proves buckets: for this machine in the order in which users feel them, else the largest first."""
        if self.plan.target.local:
            todo = sorted(todo, key=lambda bucket: (bucket.kind != "decode", bucket.tokens))
        else:
            todo = sorted(todo, key=lambda bucket: -bucket.tokens)
        label = f"compile and verify ({self.backend.name})" if self.plan.target.local else f"lower for {self.plan.target.name}"
        with self.progress.bar(label, len(todo)) as bar:
            for result in run_all([self._job(bucket) for bucket in todo], self.jobs):
                bar.step(self._finish(result))

    def _job(self, bucket: Bucket) -> CompileJob:
        known = self._known(bucket)
        key = known.compiled.key if known and known.compiled and self.writer.keep(known.compiled.file) else ""
        return CompileJob(self.plan, bucket, self.cache_dir, self.lowered.get(bucket), key, self.nice)

    def _finish(self, result: CompileResult) -> str:
        """Takes in what the pool made of a bucket; returns the line to show."""
        bucket = result.job.bucket
        self.seconds[bucket.name] = result.seconds
        if result.staged:
            check_ranks(expand(result.staged.collectives, self.plan.mesh))
            self.entries[bucket] = self._entry(bucket, result.staged, None)
        entry = self.entries[bucket]
        if result.compiled:
            file = self.writer.add("graphs", result.compiled.data, str(self.backend.suffix))
            entry = replace(entry, compiled=CompiledFile(self.backend.name, file, entry.digest), census=result.compiled.census)
        elif self.backend.suffix is not None:
            entry = self._with_known(entry)
        self.entries[bucket] = entry
        if self.plan.target.local:
            self._prove(bucket)
            return f"{bucket.name} {result.seconds:.1f} s, logits within {self.entries[bucket].verified['logits_error']:.1e}"
        if result.staged:
            self.unfinished.keep(entry, result.staged.texts, result.compiled.data if result.compiled else b"")
        return f"{bucket.name} {result.seconds:.1f} s, {sum(entry.census.values())} operators"
