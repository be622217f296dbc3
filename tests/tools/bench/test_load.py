from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.tiny import QUIET

from npucompile.graphs.errors import NpucompileError
from npucompile.tools.bench import load as bench_load
from npucompile.tools.bench.load import STAGES, load, probe
from npucompile.tools.bench.stats import spread

OUTSIDE = {"import", "process_to_first_token"}
"""Stages that a process cannot see of itself."""


class Ticks:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_probe_takes_each_stage_apart(tiny_artifact: Path) -> None:
    ms = probe(tiny_artifact, 5, Ticks())
    assert set(ms) == set(STAGES) - OUTSIDE
    # Looks: began, opened | weights: two | ready; so opening is 1 s, weights 1 s, and the whole to ready 4 s.
    assert (ms["open"], ms["weights"], ms["executables"]) == (1e3, 1e3, 2e3)
    assert ms["to_first_token"] == ms["open"] + ms["weights"] + ms["executables"] + ms["first_token"]
    assert ms["first_token"] > 0
    assert ms["second_request"] == ms["first_token"]


class Processes:
    """Stands for fresh processes that share a clock with this one."""

    def __init__(self, clock: Ticks) -> None:
        self.clock = clock
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> str:
        self.asked.append(list(arguments))
        n = len(self.asked)
        self.clock.now += n
        times = {stage: 10.0 * n for stage in STAGES if stage not in OUTSIDE}
        return json.dumps({"imported_s": self.clock.now, **times})


def test_every_process_but_the_first_counts(tmp_path: Path) -> None:
    clock = Ticks()
    processes = Processes(clock)
    table = load(tmp_path, prompt_tokens=7, rounds=3, threads=2, environment={}, progress=QUIET, launch=processes, clock=clock)
    assert processes.asked == [[str(tmp_path), "7", "2"]] * 4
    assert [row["stage"] for row in table.rows] == list(STAGES.values())
    measured = {row["stage"]: row["ms"] for row in table.rows}
    assert measured[STAGES["import"]] == spread([2e3, 3e3, 4e3])
    assert measured[STAGES["open"]] == spread([20.0, 30.0, 40.0])
    assert measured[STAGES["process_to_first_token"]] == spread([2020.0, 3030.0, 4040.0])


def test_a_fresh_process_serves_a_token(tiny_artifact: Path) -> None:
    report = json.loads(bench_load._launch([str(tiny_artifact), "3", "1"], dict(os.environ)))
    assert set(report) == {"imported_s", *STAGES} - OUTSIDE


def test_a_process_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho it is raining >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(NpucompileError, match=r"that loads some/path ended with status 3: it is raining"):
        bench_load._launch(["some/path", "3", "1"], {})
