"""tools/build/compile_pool.py: jobs cross processes whole, failures stop the rest, compilers leave a server its cores."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from support import tiny

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.graph_io import encode
from npucompile.lowering.executable import load_compiled
from npucompile.tools.build import compile_pool
from npucompile.tools.build.compile_pool import Job


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def jobs(tiny_checkpoint, tmp_path):
    made = tiny.planned(tiny_checkpoint)
    one = tiny.stage_once(made, Bucket("decode", 1, 4))
    graph, signature = encode(one.eager.graph), one.eager.signature
    return [Job(name, graph, signature, "eager", tmp_path / f"{name}.graph", tmp_path, 0) for name in ("a", "b", "c")]


def test_in_this_process_jobs_run_one_after_the_other(jobs):
    done = list(compile_pool.run_all(jobs, 1))
    assert [one.job for one in done] == jobs
    for one in done:
        assert load_compiled(one.job.out_path, "eager").backend == "eager"
        assert one.job.out_path.read_bytes() == one.job.graph
        assert one.seconds >= 0


def test_in_other_processes_every_job_is_done_and_the_first_failure_is_told(jobs):
    """One pool for both: starting processes is what takes time."""
    broken = replace(jobs[2], backend="abacus")
    done = []
    with pytest.raises(LoweringError, match=r"no backend 'abacus'; legal are .*eager"):
        done.extend(one.job for one in compile_pool.run_all([*jobs[:2], broken], 2))
    assert not broken.out_path.exists()
    # Both were begun before the third, and what is begun is finished.
    assert all(job.out_path.read_bytes() == job.graph for job in jobs[:2])
    assert all(job in jobs for job in done)


def test_a_failure_leaves_later_jobs_undone(jobs):
    with pytest.raises(LoweringError):
        list(compile_pool.run_all([jobs[0], replace(jobs[1], backend="abacus"), jobs[2]], 1))
    assert [job.out_path.exists() for job in jobs] == [True, False, False]


def test_patience_is_how_nice_a_compiler_is_at_least(monkeypatch, jobs):
    niceness = [3]
    monkeypatch.setattr(os, "getpriority", lambda which, who: niceness[-1])
    monkeypatch.setattr(os, "setpriority", lambda which, who, value: niceness.append(value))
    for patience in (0, 10, 10, 5):
        compile_pool.run(replace(jobs[0], patience=patience))
    assert niceness == [3, 10]
