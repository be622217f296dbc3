"""Turns lowered graphs into executable files, several at a time, each in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from ...graphs import ops as ops
from ...graphs.types import Signature
from ...lowering.artifact.graph_io import decode
from ...lowering.backend import backend


@dataclass(frozen=True)
class Job:
    """One graph to compile; plain data, so that it can cross to another process.

    Attributes:
        name: the bucket's name, for reports.
        graph: the lowered graph, serialised.
        out_path: executable file to write.
        threads: CPU threads the code is specialised for; 0 asks at run time.
        patience: least niceness of the compiling process, so that a server beside it keeps its cores.
    """

    name: str
    graph: bytes
    signature: Signature
    backend: str
    out_path: Path
    cache_dir: Path
    threads: int
    patience: int = 0


@dataclass(frozen=True)
class Done:
    """One compiled graph and what it took."""

    job: Job
    seconds: float


def run(job: Job) -> Done:
    """Compiles one job in this process."""
    began = time.monotonic()
    if job.patience > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, job.patience)
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    compile_graph = backend(job.backend).compile
    assert compile_graph is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile_graph(decode(job.graph), job.signature, job.out_path, cache_dir=job.cache_dir, threads=job.threads)
    return Done(job, time.monotonic() - began)


def run_all(jobs: Sequence[Job], workers: int) -> Iterator[Done]:
    """Yields each job as it is done, in any order; jobs are started in the order given.

    Raises:
        LoweringError: of the first job that fails; the others are cancelled.
    """
    if workers <= 1 or len(jobs) <= 1:
        yield from map(run, jobs)
        return
    # Fresh interpreters: a fork would inherit torch's thread pools in whatever state they are.
    pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=multiprocessing.get_context("spawn"))
    try:
        for future in as_completed([pool.submit(run, job) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
