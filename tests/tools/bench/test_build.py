from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import click
import pytest
from support import tiny
from support.tiny import QUIET

from npucompile.graphs.errors import NpucompileError
from npucompile.tools.bench import build
from npucompile.tools.bench.stats import spread
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.notation import PrefillSize


def test_arguments_are_read_as_the_build_command_reads_them(tiny_checkpoint: Path) -> None:
    arguments = plan(Options(str(tiny_checkpoint), (2, 4), (PrefillSize(8),), 64, 5, "float32", "eager")).arguments
    expected = Options(str(tiny_checkpoint.resolve()), (2, 4), (PrefillSize(8),), 64, 5, "float32", "eager")
    # What the plan chose is said, so that another version's choice does not make another artifact.
    read = build.options(arguments)
    assert read.decided_by
    assert replace(read, decided_by=None) == replace(
        expected, num_speculative_tokens=3, max_logprobs=20, structured_outputs=8, logit_adjustments=8
    )
    assert plan(build.options(arguments)).arguments == arguments
    assert build.options(["qwen3.5-tiny"]) == Options("qwen3.5-tiny")
    with pytest.raises(click.UsageError, match="no-such"):
        build.options(["m", "--no-such", "1"])


class Builds:
    """Stands for the processes: notes what each is asked, and whether it finds what an earlier one left."""

    def __init__(self) -> None:
        self.found: list[tuple[bool, bool]] = []
        self.roots: list[Path] = []
        self.words: list[list[str]] = []

    def __call__(self, words: Sequence[str]) -> str:
        out, cache = Path(words[0]), Path(words[1])
        self.found.append((out.exists(), cache.exists()))
        self.roots.append(out.parent)
        self.words.append(list(words[2:]))
        out.mkdir(exist_ok=True)
        cache.mkdir(exist_ok=True)
        compiled = {} if self.found[-1][0] else {"decode-b1-q4": 10.0 * len(self.found), "prefill-b1-q4": 5.0}
        return json.dumps({"build_s": 1.0 * len(self.found), "ready_s": 0.5, "compiled": compiled})


def test_each_round_is_cold_then_warm_then_unchanged_and_leaves_nothing() -> None:
    builds = Builds()
    ticks = iter(range(100))
    table = build.build(
        ["m", "--buckets", "1"], jobs=3, rounds=2, environment={}, progress=QUIET, launch=builds, clock=lambda: float(next(ticks))
    )
    # (artifact is there, caches are there)
    assert builds.found == [(False, False), (False, True), (True, True)] * 2
    assert all(words == ["3", "m", "--buckets", "1"] for words in builds.words)
    assert len(set(builds.roots)) == 2
    assert not any(root.exists() for root in builds.roots)
    rows = {str(row["what"]): row for row in table.rows}
    assert rows["compile decode-b1-q4"] == {"what": "compile decode-b1-q4", "cold_s": spread([10.0, 40.0]), "warm_s": spread([20.0, 50.0])}
    assert rows[build.TOTALS["build_s"]]["again_s"] == spread([3.0, 6.0])
    assert rows[build.TOTALS["process_s"]]["cold_s"] == spread([1.0, 1.0])
    assert len(rows) == 2 + len(build.TOTALS)


def test_one_build_says_what_it_took(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = tiny.planned(tiny_checkpoint, buckets=(1,), prefill=(4,)).arguments
    with mock.patch.object(build.building, "stage", tiny.stage_once):
        build.main([str(tmp_path / "out"), str(tmp_path / "cache"), "1", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"build_s", "ready_s", "compiled"}
    assert report["compiled"] == {}
    assert (tmp_path / "out" / "manifest.msgpack").is_file()


def test_a_process_is_asked_as_main_reads_and_answers_on_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", 'echo "$@"'))
    words = ["out", "cache", "1", "m", "--buckets", "1"]
    assert build._launch(words, {}).split() == ["-m", "npucompile.tools.bench.build", *words]


def test_a_build_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", "exit 3"))
    with pytest.raises(NpucompileError, match="the build of some-model ended with status 3"):
        build.build(["some-model"], jobs=1, rounds=1, environment={}, progress=QUIET)


def script(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)
