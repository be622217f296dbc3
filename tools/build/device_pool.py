"""Turns buckets of a plan for NPUs into GE graphs and what is to be known of them, several at a time in processes of their own."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from ...graphs import ops as ops
from ...graphs.errors import LoweringError
from ...graphs.types import Bucket, Leaf
from ...lowering import collectives_check
from ...lowering.ascend import inspect_ge
from ...lowering.ascend.ge_file import decode
from ...lowering.backend import backend
from .plan import Plan
from .stages import stage


@dataclass(frozen=True)
class Job:
    """One bucket; plain data, so that it can cross to another process.

    Attributes:
        out_path: file to write the GE graph to.
    """

    plan: Plan
    bucket: Bucket
    out_path: Path
    cache_dir: Path


@dataclass(frozen=True)
class Done:
    """What became of a bucket.

    Attributes:
        lowered: text whose digest keys the graph.
        stages: compressed texts of all stages.
        census: operators of the GE graph by type.
        seconds: wall time.
    """

    job: Job
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    lowered: str
    stages: bytes
    cost: Mapping[str, int]
    memory: Mapping[str, int]
    collectives: tuple[tuple[str, str, str], ...]
    census: Mapping[str, int]
    seconds: float


def run(job: Job) -> Done:
    """Takes one bucket from its program to its file, in this process.

    Raises:
        NpucompileError: naming the bucket's stage that cannot go on, or what the graph breaks.
    """
    began = time.monotonic()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    made = backend(job.plan.backend)
    # Graphs here are read and rewritten, never called: writing Python for each of them would cost a fifth of the time.
    with warnings.catch_warnings(), _use_lazy_graph_module(True):
        warnings.simplefilter("ignore")
        made.prepare(job.cache_dir)
        staged = stage(job.plan, job.bucket)
        assert staged.target is not None
        collectives, census = staged.partitioned.collectives, {}
        if made.compile:
            made.compile(staged.target.graph, staged.target.signature, job.out_path, cache_dir=job.cache_dir, threads=0)
            ge_file = decode(job.out_path.read_bytes())
            collectives_check.agree(collectives, collectives_check.of_ge_file(ge_file, in_order=True))
            census = inspect_ge.census(ge_file.graph)
    signature = staged.partitioned.signature
    texts = zlib.compress(json.dumps(staged.texts, sort_keys=True).encode(), 6)
    return Done(
        job,
        signature.inputs,
        signature.outputs,
        staged.texts["lowered"],
        texts,
        staged.cost,
        staged.memory,
        collectives,
        census,
        time.monotonic() - began,
    )


def _run_alone(job: Job) -> Done:
    """`run` in a process that does nothing else.

    What outlives a bucket are modules and torch's caches. Garbage collectors walk over them again and again, for a fifteenth of the
    time, unless they are told not to.
    """
    done = run(job)
    gc.collect()
    gc.freeze()
    return done


def run_all(jobs: Sequence[Job], workers: int) -> Iterator[Done]:
    """Yields each bucket as it is done, in any order; the largest are started first.

    Raises:
        NpucompileError: of the first that fails, or saying that a process was killed; the others are cancelled.
    """
    if workers <= 1 or len(jobs) <= 1:
        yield from map(run, jobs)
        return
    # Fresh interpreters: a fork would inherit torch's thread pools in whatever state they are.
    pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=multiprocessing.get_context("spawn"), initializer=gc.freeze)
    try:
        ordered = sorted(jobs, key=lambda job: -job.bucket.tokens)
        for future in as_completed([pool.submit(_run_alone, job) for job in ordered]):
            yield future.result()
    except BrokenProcessPool:
        raise LoweringError(
            f"one of {min(workers, len(jobs))} processes that lower was killed, for want of memory more likely than not; "
            "what was finished is kept: build again, with --jobs 1 to need less"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
