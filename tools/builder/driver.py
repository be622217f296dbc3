"""Builds the artifact of a plan.

An artifact for this machine can serve as soon as every bucket has its eager reference graph; executables are added as they are
compiled, each once it agrees with that reference. Graphs for NPUs cannot run here: the pool stages, compiles and checks every bucket,
and the artifact is published when all of them are complete.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...graphs.errors import LoweringError, VerifyError
from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket, Signature
from ...lowering.artifact.artifact import Artifact, ArtifactWriter, GraphEntry, Manifest
from ...lowering.artifact.graph_io import encode
from ...lowering.artifact.manifest import ExecutableRecord
from ...lowering.artifact.shards import local_signature
from ...lowering.backend import Backend, backend
from ...lowering.collectives_check import check_ranks, expand
from ...lowering.lower import LoweredProgram
from ...lowering.toolchain import toolchain
from ..agreement import executables
from ..progress import Progress
from . import derived
from .cache import UnfinishedBuild
from .describe import describe
from .environment import environment
from .kinds import Kinds
from .planned import Plan
from .pool import THREADS, CompileJob, CompileResult, StagedRecord, record_of, rewriting, run_all
from .rank_memory import check_before_lowering, communicator_bytes, rank_memory
from .stages import stage
from .stamp import bucket_stamp


@dataclass(frozen=True)
class BuildReport:
    """What a build did.

    Attributes:
        seconds: wall time of the whole build.
        ready_seconds: wall time until the artifact could serve, compiled or not.
        compiled: bucket name to compile seconds, for buckets compiled by this build.
        reused: names of buckets that were up to date.
    """

    path: Path
    seconds: float
    ready_seconds: float
    compiled: Mapping[str, float]
    reused: tuple[str, ...]


def build(
    plan: Plan, out: Path, cache_dir: Path, progress: Progress, *, jobs: int = 2, nice: int = 0, made: Sequence[CompileResult] = ()
) -> BuildReport:
    """Builds the artifact at `out`, or brings it up to date.

    A bucket whose stamp equals the one in the previous artifact is taken over unchanged. Any other bucket is staged, and compiled only
    if its key (lowered graph, backend, options, toolchain) changed. A refused build leaves what was there before, or nothing; an
    interrupted build continues where it stopped.

    Args:
        cache_dir: compiler caches that outlive the build, and the finished buckets of interrupted builds.
        jobs: processes that compile at a time.
        nice: niceness of those processes.
        made: buckets of an NPU that were made already, perhaps of other plans.

    Raises:
        NpucompileError: naming what cannot be built.
    """
    began = time.monotonic()
    if reason := backend(plan.backend).compiles_here():
        raise LoweringError(reason)
    with ArtifactWriter(out) as writer:
        # First, so that an unusable checkpoint is refused before minutes of tracing.
        manifest = describe(plan, writer, progress)
        cache_dir.mkdir(parents=True, exist_ok=True)
        if not plan.target.local:
            check_before_lowering(plan, manifest)
        stamps = {bucket: bucket_stamp(*facts(plan, bucket)) for bucket in (*plan.buckets, *plan.references)}
        state = _Build(plan, writer, manifest, progress, cache_dir, jobs, nice, UnfinishedBuild(cache_dir / "unfinished"), stamps, made)
        _take_over(state)
        unchanged = set(state.entries)
        ready_seconds = _build_local(state, began) if plan.target.local else _build_for_device(state, began)
        writer.collect(state.manifest)
        state.unfinished.forget(list(stamps.values()))
    compiled = state.compile_seconds
    reused = [b.name for b in plan.buckets if b.name not in compiled and (b in unchanged or state.compiles)]
    return BuildReport(out, time.monotonic() - began, ready_seconds, compiled, tuple(reused))


def taken(plan: Plan, made: Iterable[CompileResult]) -> dict[Bucket, CompileResult]:
    """Of results those of buckets that a plan has, graph by graph the same."""
    return {
        result.job.bucket: result
        for result in made
        if result.job.bucket in plan.buckets and facts(plan, result.job.bucket) == facts(result.job.plan, result.job.bucket)
    }


def facts(plan: Plan, bucket: Bucket) -> tuple[object, ...]:
    """Everything that decides a bucket's graph, besides the sources of this package."""
    chosen = backend(plan.backend)
    return (
        plan.source.name,
        plan.source.text,
        plan.source.family_file.digest if plan.source.family_file else "",
        repr(plan.model.config),
        repr(plan.model.tower),
        repr(bucket),
        repr(plan.limits),
        plan.max_logprobs,
        str(plan.dtype),
        str(plan.mesh),
        repr(plan.rules(bucket)),
        plan.target.name,
        plan.backend,
        repr(plan.platform),
        sorted(chosen.options(THREADS).items()),
        sorted({**toolchain(), **chosen.versions()}.items()),
    )


@dataclass
class _Build:
    """A build in progress.

    Attributes:
        manifest: the one last published; at first `describe`'s, which has no graphs.
        jobs, nice: processes that compile at a time, and their niceness.
        unfinished: finished buckets of interrupted builds.
        stamps: of all buckets, `plan.references` included.
        made: as for `build`.
        entries: buckets taken over or staged so far.
        compile_seconds: by bucket name, of buckets compiled so far.
        proof: of the executables, made when the first is verified.
        left_out: buckets whose executables disagreed.
    """

    plan: Plan
    writer: ArtifactWriter
    manifest: Manifest
    progress: Progress
    cache_dir: Path
    jobs: int
    nice: int
    unfinished: UnfinishedBuild
    stamps: Mapping[Bucket, str]
    made: Sequence[CompileResult]
    entries: dict[Bucket, GraphEntry] = field(default_factory=dict)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    proof: executables.Proof | None = None
    left_out: dict[Bucket, VerifyError] = field(default_factory=dict)

    @property
    def backend(self) -> Backend:
        return backend(self.plan.backend)

    @property
    def compiles(self) -> bool:
        """Whether buckets get executables besides the eager reference."""
        return self.backend.suffix is not None and self.plan.backend != "eager"

    @property
    def previous(self) -> Manifest | None:
        """Manifest of the artifact that is brought up to date."""
        return self.writer.previous.manifest if self.writer.previous else None

    @property
    def same_weights(self) -> bool:
        """Whether the previous artifact has the weights of this one."""
        return self.previous is not None and self.previous.weights == self.manifest.weights

    def is_complete(self, bucket: Bucket) -> bool:
        """Whether nothing of a bucket is left to stage or compile."""
        entry = self.entries.get(bucket)
        done = entry is not None and (entry.compiled is not None or bool(entry.refused))
        return entry is not None and (done or not self.compiles or bucket not in self.plan.buckets)

    def previous_entry(self, bucket: Bucket) -> GraphEntry | None:
        """The bucket's entry in the previous artifact, where it has an intact executable."""
        entries = self.previous.graphs if self.previous else ()
        return next((e for e in entries if e.bucket == bucket and e.compiled and self.writer.keep(e.compiled.file)), None)

    def add_staged(self, bucket: Bucket, record: StagedRecord, eager: str | None) -> None:
        """Adds a staged bucket, with the previous artifact's executable where its key is the same; `eager` is its reference graph."""
        entry = GraphEntry(
            bucket=bucket,
            inputs=record.inputs,
            outputs=record.outputs,
            eager=eager,
            stages=self.writer.add("stages", record.texts, "json.z"),
            digest=record.key,
            compiled=None,
            cost=record.cost,
            memory=record.memory.as_dict(),
            collectives=record.collectives,
            verified={},
            stamp=self.stamps[bucket],
        )
        before = self.previous_entry(bucket) if bucket in self.plan.buckets else None
        if before and before.digest == record.key:
            # A verification holds for the weights and the reference it was made with.
            verified = before.verified if self.same_weights and before.eager == eager else {}
            entry = replace(entry, compiled=before.compiled, census=before.census, any_size=before.any_size, verified=verified)
        self.entries[bucket] = entry

    def rank_signature(self, bucket: Bucket) -> Signature:
        """The calling convention of a bucket's graph on one rank."""
        return local_signature(self.manifest, self.entries[bucket])

    def add_result(self, result: CompileResult) -> GraphEntry:
        """Adds what the pool made of a bucket."""
        bucket = result.job.bucket
        self.compile_seconds[bucket.name] = result.seconds
        if result.staged:
            self.add_staged(bucket, result.staged, None)
        if result.compiled:
            entry, file = self.entries[bucket], self.writer.add("graphs", result.compiled.data, str(self.backend.suffix))
            compiled = ExecutableRecord(self.backend.name, file, entry.digest)
            self.entries[bucket] = replace(entry, compiled=compiled, census=result.compiled.census)
        return self.entries[bucket]

    def verify(self, bucket: Bucket) -> Mapping[str, float]:
        """Publishes a bucket's executable once it agrees with the eager reference; returns the measurements.

        Raises:
            VerifyError: it does not agree.
        """
        artifact = Artifact(self.writer.root, self.manifest, "")
        self.proof = self.proof or executables.Proof(artifact)
        measured = self.proof.entry(artifact, self.entries[bucket])
        self.entries[bucket] = replace(self.entries[bucket], verified=measured)
        self.publish()
        return measured

    def verified(self, bucket: Bucket) -> str:
        """`verify`, or leaves out an executable that disagrees where its reference is right; returns what to say of it.

        Raises:
            VerifyError: the reference is wrong.
        """
        try:
            return executables.said(bucket, self.verify(bucket))
        except executables.ExecutableDisagrees as error:
            self.left_out[bucket] = error
            self.entries[bucket] = replace(self.entries[bucket], compiled=None, verified={})
            return f"left out: {error}; its steps run in the next larger bucket, or uncompiled where there is none"

    def check_left_out(self) -> None:
        """Publishes why executables were left out, for which the next build does not compile them again.

        Raises:
            VerifyError: the first of them, where no bucket has an executable.
        """
        if not self.left_out:
            return
        if not any(self.entries[bucket].compiled for bucket in self.plan.buckets):
            raise next(iter(self.left_out.values()))
        for bucket, error in self.left_out.items():
            self.entries[bucket] = replace(self.entries[bucket], refused=str(error))
        self.publish()

    def publish(self) -> None:
        """Publishes all entries; on this machine without executables that are not verified with these weights."""
        entries = {
            bucket: entry if entry.verified or not self.plan.target.local else replace(entry, compiled=None)
            for bucket, entry in self.entries.items()
        }
        graphs, references = (tuple(entries[bucket] for bucket in part) for part in (self.plan.buckets, self.plan.references))
        self.manifest = self.writer.publish(replace(self.manifest, graphs=graphs, references=references))


def _take_over(state: _Build) -> None:
    """Takes over buckets of the previous artifact, or of an interrupted build, whose stamp is unchanged and whose files are intact."""
    plan, writer, previous = state.plan, state.writer, state.previous
    for entry in (*previous.graphs, *previous.references) if previous else ():
        if state.stamps.get(entry.bucket) == entry.stamp and all([writer.keep(name) for name in entry.files]):
            if entry.bucket not in plan.buckets:
                entry = replace(entry, compiled=None, verified={})
            elif not state.same_weights:
                entry = replace(entry, verified={}, refused="")
            state.entries[entry.bucket] = entry
    for bucket in plan.buckets if not plan.target.local else ():
        stamp, suffix = state.stamps[bucket], str(state.backend.suffix)
        if bucket not in state.entries and (finished := state.unfinished.take(stamp, writer, suffix)):
            state.entries[bucket] = finished


def _build_local(state: _Build, began: float) -> float:
    """Publishes every bucket with its eager reference, then adds executables; returns the seconds until the artifact could serve."""
    plan, progress = state.plan, state.progress
    if any(not state.is_complete(bucket) for bucket in plan.buckets) and state.jobs > 1:
        threading.Thread(target=_warm, args=(state,), daemon=True).start()
    lowered = _stage_local(state)
    state.publish()
    ready_seconds = time.monotonic() - began
    for bucket in plan.buckets:
        if state.entries[bucket].compiled and not state.entries[bucket].verified:
            progress.say(f"{bucket.name} with the new weights: {state.verified(bucket)}")
    if not lowered:
        state.check_left_out()
        return ready_seconds
    threads, count = torch.get_num_threads(), f"{len(lowered)} of {len(plan.buckets)} buckets"
    progress.say(f"{state.writer.path} can serve ({ready_seconds:.1f} s); compiling {count} for speed")
    with progress.bar(f"compile and verify ({state.backend.name})", len(lowered)) as bar:
        for result in run_all(_compile_jobs(state, lowered), state.jobs):
            # While others compile, threads that wait for each other at every operator would wait for a core first.
            torch.set_num_threads(threads if result.last else 1)
            bucket = state.add_result(result).bucket
            bar.step(f"{bucket.name} {result.seconds:.1f} s, {state.verified(bucket)}")
    state.check_left_out()
    return ready_seconds


def _warm(state: _Build) -> None:
    # A thread is as nice as it says, and so is what it starts. Who compiles then says what is wrong.
    os.setpriority(os.PRIO_PROCESS, 0, max(state.nice, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(LoweringError):
        state.backend.warm(state.cache_dir)


def _compile_jobs(state: _Build, lowered: Mapping[Bucket, LoweredProgram]) -> Iterator[CompileJob]:
    """What is to compile, each made when it is asked for: others compile meanwhile."""
    kinds = Kinds(state.plan, state.progress)
    # The buckets whose speed users notice most come first.
    for bucket in sorted(lowered, key=lambda bucket: (not kind_of(bucket).decodes, bucket.tokens)):
        with rewriting():
            graph = kinds.parts(lowered[bucket]) or (encode(lowered[bucket].graph), lowered[bucket].signature)
        state.entries[bucket] = replace(state.entries[bucket], any_size=bucket in kinds.any_size)
        yield CompileJob(state.plan, bucket, state.cache_dir, graph, nice=state.nice)


def _stage_local(state: _Build) -> dict[Bucket, LoweredProgram]:
    """Adds every bucket's eager graph, and previous executables whose key is unchanged; returns lowered graphs that need compiling."""
    plan, todo = state.plan, [bucket for bucket in state.stamps if not state.is_complete(bucket)]
    lowered: dict[Bucket, LoweredProgram] = {}
    with state.progress.bar("trace, partition, lower", len(todo)) as bar, rewriting():
        for bucket in todo:
            staged = stage(plan, bucket)
            reference = staged.lowered if plan.backend == "eager" else backend("eager").lower(staged.partitioned)
            eager = state.writer.add("graphs", encode(reference.graph), "graph")
            state.add_staged(bucket, record_of(plan, staged), eager)
            if not state.is_complete(bucket):
                lowered[bucket] = staged.lowered
            bar.step(bucket.name)
    return lowered


def _build_for_device(state: _Build, began: float) -> float:
    """Stages and compiles buckets in the pool, then publishes all of them; returns the seconds until then.

    Raises:
        NpucompileError: a bucket's ranks would wait for ever, or a rank's memory is too small.
    """
    plan = state.plan
    todo = sorted((bucket for bucket in plan.buckets if not state.is_complete(bucket)), key=lambda bucket: -bucket.tokens)
    known = {bucket: entry.digest for bucket in todo if (entry := state.previous_entry(bucket))}
    jobs = [CompileJob(plan, bucket, state.cache_dir, known_key=known.get(bucket, ""), nice=state.nice) for bucket in todo]
    if todo:
        made = taken(plan, state.made)
        ready = [replace(made[job.bucket], job=job) for job in jobs if job.bucket in made]
        with state.progress.bar(f"lower for {plan.target.name}", len(todo)) as bar:
            for result in derived.results(plan, jobs, ready, state.jobs, state.rank_signature, state.progress):
                entry = state.add_result(result)
                check_ranks(expand(entry.collectives, plan.mesh))
                texts = (state.writer.root / entry.stages).read_bytes()
                graph = (state.writer.root / entry.compiled.file).read_bytes() if entry.compiled else b""
                state.unfinished.keep(entry, texts, graph)
                bar.step(f"{entry.bucket.name} {result.seconds:.1f} s, {sum(entry.census.values())} operators")
    entries = [state.entries[bucket] for bucket in plan.buckets]
    planned = rank_memory(plan, state.manifest, entries)
    planned.check()
    sizes = communicator_bytes(plan, entries)
    variables = environment(plan.target, plan.mesh, sizes, captured=plan.backend == "aclgraph")
    state.manifest = replace(state.manifest, memory=planned.as_dict(), communicator_bytes=sizes, environment=variables)
    state.publish()
    return time.monotonic() - began
