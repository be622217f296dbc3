"""Compiles buckets of a plan, several at a time, each in a process that does nothing else."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ...graphs import ops as ops
from ...graphs.errors import LoweringError
from ...graphs.types import Bucket, Leaf, Signature
from ...lowering.artifact.artifact import graph_key
from ...lowering.artifact.graph_io import decode
from ...lowering.backend import Compiled, backend
from ...lowering.lower import Lowered
from ...lowering.toolchain import toolchain
from .plan import Plan
from .stages import Staged, pack_texts, stage

THREADS = 0
"""Compiled code asks the process for its thread count, so that one artifact serves machines of any size."""


@dataclass(frozen=True)
class CompileJob:
    """One bucket; plain data, so that it can cross to another process.

    Attributes:
        lowered: the lowered graph (`graph_io.encode`) and its signature, where the caller has them already; else the process makes them.
        known_key: graph key of an executable that is there already; a graph of that key is not compiled again.
        nice: least niceness of the process, so that a server beside it keeps its cores.
    """

    plan: Plan
    bucket: Bucket
    cache_dir: Path
    lowered: tuple[bytes, Signature] | None = None
    known_key: str = ""
    nice: int = 0


@dataclass(frozen=True)
class StagedRecord:
    """What an artifact keeps of a staged bucket: no graphs.

    Attributes:
        key: `graph_key` of the lowered graph.
        texts: packed texts of all stages.
    """

    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    key: str
    texts: bytes
    cost: Mapping[str, int]
    memory: Mapping[str, int]
    collectives: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class CompileResult:
    """What became of a bucket.

    Attributes:
        staged: None where the caller had staged it.
        compiled: None where there is nothing to compile, or its key was known.
        seconds: wall time.
    """

    job: CompileJob
    staged: StagedRecord | None
    compiled: Compiled | None
    seconds: float


def record_of(plan: Plan, staged: Staged) -> StagedRecord:
    """What the artifact keeps of a staged bucket."""
    partitioned, texts, chosen = staged.partitioned, staged.texts, backend(plan.backend)
    key = graph_key(texts["lowered"], chosen.name, chosen.options(THREADS), {**toolchain(), **chosen.versions()})
    return StagedRecord(
        partitioned.signature.inputs,
        partitioned.signature.outputs,
        key,
        pack_texts(texts),
        asdict(partitioned.cost()),
        asdict(partitioned.memory()),
        partitioned.collectives,
    )


def run(job: CompileJob) -> CompileResult:
    """Compiles one bucket in this process, and proves of the executable what can be proved without running it.

    Raises:
        NpucompileError: naming the bucket's stage that cannot go on, or what its executable breaks.
    """
    began = time.monotonic()
    if job.nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, job.nice)
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    # Graphs are read and rewritten here, never called: writing Python for each of them would cost a fifth of the time.
    with warnings.catch_warnings(), _use_lazy_graph_module(True):
        warnings.simplefilter("ignore")
        record, compiled = _compile(job)
    return CompileResult(job, record, compiled, time.monotonic() - began)


def _compile(job: CompileJob) -> tuple[StagedRecord | None, Compiled | None]:
    chosen = backend(job.plan.backend)
    chosen.prepare(job.cache_dir)
    if job.lowered:
        data, signature = job.lowered
        lowered = Lowered(job.bucket, chosen.name, decode(data), signature)
        return None, chosen.compile(lowered, cache_dir=job.cache_dir, threads=THREADS)
    staged = stage(job.plan, job.bucket)
    record = record_of(job.plan, staged)
    if chosen.suffix is None or record.key == job.known_key:
        return record, None
    compiled = chosen.compile(staged.lowered, cache_dir=job.cache_dir, threads=THREADS)
    chosen.prove(compiled, staged.partitioned)
    return record, compiled


def _run_alone(job: CompileJob) -> CompileResult:
    """`run` in a process of the pool.

    What outlives a bucket are modules and torch's caches. Garbage collectors walk over them again and again, for a fifteenth of the
    time, unless they are told not to.
    """
    result = run(job)
    gc.collect()
    gc.freeze()
    return result


def run_all(jobs: Sequence[CompileJob], workers: int) -> Iterator[CompileResult]:
    """Yields each bucket as it is compiled, in any order; jobs are started in the order given.

    Raises:
        NpucompileError: of the first that fails, or saying that a process was killed; the others are cancelled.
    """
    if workers <= 1 or len(jobs) <= 1:
        yield from map(run, jobs)
        return
    # Fresh interpreters: a fork would inherit torch's thread pools in whatever state they are.
    pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=multiprocessing.get_context("spawn"), initializer=gc.freeze)
    try:
        for future in as_completed([pool.submit(_run_alone, job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool:
        raise LoweringError(
            f"one of {min(workers, len(jobs))} processes that compile was killed, for want of memory more likely than not; "
            "what was finished is kept: build again, with --jobs 1 to need less"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
