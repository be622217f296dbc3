"""Compiles buckets of a plan in a pool of processes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ...graphs import ops as ops
from ...graphs.cost import Memory, cached_flops
from ...graphs.errors import LoweringError
from ...graphs.types import Bucket, Leaf, Signature
from ...lowering.artifact.artifact import graph_key
from ...lowering.artifact.graph_io import decode
from ...lowering.backend import Backend, CompiledFile, GraphPart, GraphParts, backend
from ...lowering.lower import LoweredProgram
from ...lowering.toolchain import toolchain
from ...models.family_file import FamilyFile
from .planned import Plan
from .stages import Staged, pack_texts, stage

THREADS = 0
"""Compiled code takes the thread count of its process, so that one artifact serves machines of any size."""

GARBAGE = 2_000_000
"""Objects that may wait to be collected, those of ten full-size buckets: 200 MB."""


@dataclass(frozen=True)
class CompileJob:
    """One bucket to compile, as data that can be sent to another process.

    Attributes:
        lowered: the lowered graph, if the caller staged the bucket: its parts, where the backend compiles graphs in parts, or else
            the graph (`graph_io.encode`) and its signature.
        known_key: graph key of an existing executable; a graph of that key is not compiled again.
        nice: least niceness of the process, so that a server beside it keeps its cores.
    """

    plan: Plan
    bucket: Bucket
    cache_dir: Path
    lowered: GraphParts | tuple[bytes, Signature] | None = None
    known_key: str = ""
    nice: int = 0


@dataclass(frozen=True)
class StagedRecord:
    """What an artifact stores of a staged bucket besides graphs.

    Attributes:
        key: `graph_key` of the lowered graph.
        texts: packed texts of all stages.
    """

    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    key: str
    texts: bytes
    cost: Mapping[str, int]
    memory: Memory
    collectives: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class CompileResult:
    """The result of a job.

    Attributes:
        staged: None if the caller staged the bucket.
        compiled: None if there is nothing to compile, or the key is known.
        seconds: wall time; of a graph in parts the sum over those that no bucket before it had.
        last: whether nothing is being compiled any more.
    """

    job: CompileJob
    staged: StagedRecord | None
    compiled: CompiledFile | None
    seconds: float
    last: bool = True


def record_of(plan: Plan, staged: Staged) -> StagedRecord:
    """What an artifact stores of a staged bucket."""
    partitioned, texts = staged.partitioned, staged.texts
    return StagedRecord(
        partitioned.signature.inputs,
        partitioned.signature.outputs,
        graph_key_of(plan, texts["lowered"]),
        pack_texts(texts),
        asdict(partitioned.cost()) | {"cached_flops": cached_flops(partitioned.graph)},
        partitioned.memory(),
        partitioned.collectives,
    )


def graph_key_of(plan: Plan, text: str) -> str:
    """`graph_key` of a lowered graph with this text."""
    chosen = backend(plan.backend)
    options = {**chosen.options(THREADS), "platform": repr(plan.platform)}
    return graph_key(text, chosen.name, options, {**toolchain(), **chosen.versions()})


def run(job: CompileJob) -> CompileResult:
    """Compiles one bucket in this process, and checks of the executable what can be checked without running it.

    Raises:
        NpucompileError: naming the stage that failed, or the check.
    """
    began = time.monotonic()
    with _compiling(job.nice):
        record, compiled = _compile(job)
    return CompileResult(job, record, compiled, time.monotonic() - began)


@contextlib.contextmanager
def _compiling(nice: int) -> Iterator[None]:
    """Prepares this process to compile: as nice as is asked, with one thread, and quiet."""
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), rewriting():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def rewriting() -> Iterator[None]:
    """Where graphs are rewritten and never called: generating Python code for each would take a fifth of the time, and so would the
    garbage collector, to find that nearly all of a bucket's graphs are still in use. It looks once `GARBAGE` more objects are there."""
    threshold = gc.get_threshold()
    gc.set_threshold(GARBAGE)
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        gc.set_threshold(*threshold)


def _compile(job: CompileJob) -> tuple[StagedRecord | None, CompiledFile | None]:
    chosen = backend(job.plan.backend)
    chosen.prepare(job.cache_dir)
    if isinstance(job.lowered, GraphParts):
        compiled_parts = [_compile_part(chosen, job, part) for part in job.lowered.parts]
        return None, chosen.join(job.lowered, compiled_parts, cache_dir=job.cache_dir)
    if job.lowered:
        data, signature = job.lowered
        lowered = LoweredProgram(job.bucket, chosen.name, decode(data), signature, job.plan.platform)
        return None, chosen.compile(lowered, cache_dir=job.cache_dir, threads=THREADS)
    staged = stage(job.plan, job.bucket)
    record = record_of(job.plan, staged)
    if chosen.suffix is None or record.key == job.known_key:
        return record, None
    compiled = chosen.compile(staged.lowered, cache_dir=job.cache_dir, threads=THREADS)
    chosen.prove(compiled, staged.partitioned, job.plan.platform)
    return record, compiled


def _compile_part(chosen: Backend, job: CompileJob, part: GraphPart) -> bytes:
    try:
        return chosen.compile_part(part, cache_dir=job.cache_dir, threads=THREADS)
    except LoweringError as error:
        raise LoweringError(f"{chosen.name} could not compile {job.bucket.name}: {error}") from error


def _prepare(files: Sequence[FamilyFile]) -> None:
    """Prepares a process of the pool: loads the families of users' files, whose functions and configurations the jobs refer to."""
    for file in files:
        file.load()
    gc.freeze()


def _run_in_worker(job: CompileJob) -> CompileResult:
    """`run` in a process of the pool.

    Only modules and torch's caches outlive a bucket. Freezing them keeps the garbage collector from traversing them, which would take a
    fifteenth of the time.
    """
    result = run(job)
    gc.collect()
    gc.freeze()
    return result


def _part_in_worker(job: CompileJob, part: GraphPart) -> tuple[bytes, float]:
    """A compiled part and its seconds, in a process of the pool; `job` is the first that has it, without its graph."""
    began = time.monotonic()
    with _compiling(job.nice):
        chosen = backend(job.plan.backend)
        chosen.prepare(job.cache_dir)
        data = _compile_part(chosen, job, part)
    gc.collect()
    gc.freeze()
    return data, time.monotonic() - began


def run_all(jobs: Iterable[CompileJob], workers: int) -> Iterator[CompileResult]:
    """Yields results as they complete; jobs start in the order given, each as soon as it is made. Where they bring no graph this process
    is one of the workers, and takes the last.

    Graphs in parts share the processes part by part, and a part that several graphs have is compiled for the first of them.

    Raises:
        NpucompileError: that of the first job that fails, or a process was killed; the other jobs are cancelled.
    """
    rest = iter(jobs)
    begun = list(itertools.islice(rest, 2))
    if workers <= 1 or sum(len(job.lowered.parts) if isinstance(job.lowered, GraphParts) else 1 for job in begun) <= 1:
        yield from map(run, itertools.chain(begun, rest))
        return
    file, shared = begun[0].plan.source.family_file, begun[0].lowered is None
    todo = [*begun, *rest] if shared else itertools.chain(begun, rest)
    # Forks start all at once, others as there is work for them.
    most = min(workers, len(todo)) - 1 if isinstance(todo, list) else workers
    context = multiprocessing.get_context(_start(begun[0]) if shared else "spawn")
    pool = ProcessPoolExecutor(most, mp_context=context, initializer=_prepare, initargs=((file,) if file else (),))
    try:
        yield from (_shared_results if shared else _results)(pool, todo)
    except BrokenProcessPool:
        raise LoweringError(
            f"one of up to {workers} processes that compile was killed, for want of memory more likely than not; "
            "what was finished is kept: build again, with --jobs 1 to need less"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(job: CompileJob) -> Literal["fork", "spawn"]:
    """How processes start that share jobs with this one. A fork inherits what is loaded here, for which one that is spawned takes 5 s; but
    thread pools in an undefined state: CANN's, and those of torch where graphs run in this process."""
    chosen = backend(job.plan.backend)
    if chosen.runs_here() is None:
        return "spawn"
    chosen.prepare(job.cache_dir)
    return "fork"


def _shared_results(pool: Executor, jobs: Iterable[CompileJob]) -> Iterator[CompileResult]:
    """Results of jobs in a pool and in this process, as they complete."""
    futures = {pool.submit(run, job): job for job in jobs}
    while futures:
        done = [future for future in futures if future.done()]
        if not done and (own := next((future for future in reversed(futures) if future.cancel()), None)):
            yield run(futures.pop(own))
            continue
        for future in done or wait(futures, return_when=FIRST_COMPLETED).done:
            del futures[future]
            yield future.result()


def _results(pool: Executor, jobs: Iterable[CompileJob]) -> Iterator[CompileResult]:
    """Results of jobs in a pool, as they complete."""
    whole, waiting = dict[Future[CompileResult], None](), list[tuple[CompileJob, GraphParts]]()
    futures, first = dict[str, Future[tuple[bytes, float]]](), dict[str, CompileJob]()
    for job in jobs:
        if not isinstance(job.lowered, GraphParts):
            whole[pool.submit(_run_in_worker, job)] = None
            continue
        waiting.append((job, job.lowered))
        for part in job.lowered.parts:
            if part.key not in futures:
                futures[part.key], first[part.key] = pool.submit(_part_in_worker, replace(job, lowered=None), part), job
    everything: list[Future[Any]] = [*whole, *futures.values()]
    for done in as_completed(everything):
        result = done.result()
        if done in whole:
            yield result
            continue
        for job, graph in [pair for pair in waiting if all(futures[part.key].done() for part in pair[1].parts)]:
            waiting.remove((job, graph))
            made = {part.key: futures[part.key].result() for part in graph.parts}
            compiled = backend(job.plan.backend).join(graph, [data for data, _ in made.values()], cache_dir=job.cache_dir)
            seconds = sum(seconds for key, (_, seconds) in made.items() if first[key] is job)
            yield CompileResult(job, None, compiled, seconds, all(future.done() for future in everything))
