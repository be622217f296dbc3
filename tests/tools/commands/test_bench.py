from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools import laboratory
from npucompile.tools.bench import build as bench_build
from npucompile.tools.bench import figures as bench_figures
from npucompile.tools.bench import machine
from npucompile.tools.bench.report import Column, ReportTable
from npucompile.tools.bench.streams import StreamLoad
from npucompile.tools.commands import bench
from npucompile.tools.lab import figures as lab_figures

LITTLE = ("--repetitions", 1, "--rounds", 1, "--streams", "1,2", "--tokens", 4, "--prompt-tokens", 6)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every figure of an artifact is a table with one cell; the names of those that are measured."""
    measured: list[str] = []

    def figures(artifact: Artifact, *_: Any) -> dict[str, Any]:
        def figure(name: str) -> list[ReportTable]:
            measured.append(name)
            return [ReportTable(name, f"The {name}", (Column("x", "x"),), ({"x": 1.5},))]

        return {name: (lambda name=name: figure(name)) for name in bench.FIGURES if name != "build"}

    monkeypatch.setattr(bench_figures, "figures", figures)
    monkeypatch.setattr(
        lab_figures, "figures", lambda *args: {name: run for name, run in figures(*args).items() if name in bench_figures.OF_THE_LABORATORY}
    )
    return measured


def test_figures_and_counts_are_read() -> None:
    assert bench.figure_names("peers, decode,decode") == ("decode", "peers")
    assert bench.counts("1, 4,16") == (1, 4, 16)


@pytest.mark.parametrize("text", ["", "decode,", "decoding", "decode;peers"])
def test_other_figures_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="legal is a comma-separated list of build, load, decode, prefill, streams, speculation, peers"):
        bench.figure_names(text)


@pytest.mark.parametrize("name", bench.GONE)
def test_a_figure_that_is_gone_says_what_there_is_in_its_place(name: str) -> None:
    with pytest.raises(SpecError, match=f"--only {name} is gone: .*; legal is a comma-separated list of build, load"):
        bench.figure_names(f"decode,{name}")


@pytest.mark.parametrize("text", ["", "0", "1,", "-1", "1.5", "many", "²"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="legal is a comma-separated list of integers of at least 1"):
        bench.counts(text)


def test_the_cheap_figures_of_a_built_model(own_artifact: Path, tmp_path: Path) -> None:
    result = tiny.cli(tmp_path, "bench", "tiny", "--only", "prefill,streams", "--json", *LITTLE)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["subject"]["model"] == "tiny"
    assert report["machine"]["cores"] >= 1
    assert [table["figure"] for table in report["figures"]] == ["prefill", "streams"]
    rows = report["figures"][1]["rows"]
    assert [(row["streams"], row["path"]) for row in rows] == [(1, "engine"), (1, "websocket"), (2, "engine"), (2, "websocket")]
    assert all(row["tokens_per_s"]["median"] > 0 for row in rows)


def test_text_and_markdown_hold_the_same_figures(own_artifact: Path, tmp_path: Path, pretended: list[str]) -> None:
    text = tiny.cli(tmp_path, "bench", "tiny", "--only", "decode,load", *LITTLE).stdout
    markdown = tiny.cli(tmp_path, "bench", "tiny", "--only", "decode,load", "--markdown", *LITTLE).stdout
    assert pretended == ["load", "decode"] * 2
    assert text.index("The load\n") < text.index("The decode\n")
    assert "| 1.50 |" in markdown
    assert "**The load**" in markdown
    for output in (text, markdown):
        assert " cores, " in output
        assert "model tiny, dtype f32" in output
        assert "buckets 5 (0 compiled by eager)" in output


def test_builds_are_measured_only_when_named(own_artifact: Path, tmp_path: Path, pretended: list[str]) -> None:
    assert tiny.cli(tmp_path, "bench", *LITTLE).exit_code == 0
    assert pretended == ["load", "decode", "prefill", "streams"]


def test_options_of_peers_without_peers_are_refused(own_artifact: Path, tmp_path: Path) -> None:
    for only in ((), ("--only", "decode")):
        refusal = tiny.refused(tmp_path, "bench", "tiny", "--peer-python", f"vllm={sys.executable}", *only)
        assert "--peer, --peer-python and --llama-cpp are for peers; name it in --only, or leave them out" in refusal
    assert "--peer 'sglang' is unknown; legal are llama.cpp, " in tiny.refused(tmp_path, "bench", "tiny", "--peer", "sglang")


def test_a_busy_machine_is_told(own_artifact: Path, tmp_path: Path, pretended: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (3.5, 0.0, 0.0))
    assert "load average is 3.5" in tiny.cli(tmp_path, "bench", "--only", "load", *LITTLE).stderr
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (0.1, 9.0, 9.0))
    assert "load average" not in tiny.cli(tmp_path, "bench", "--only", "load", *LITTLE).stderr


def test_a_build_is_measured_with_the_arguments_that_made_the_artifact(
    own_artifact: Path, tmp_path: Path, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[tuple[tuple[str, ...], dict[str, Any]]] = []

    def build(arguments: tuple[str, ...], **options: Any) -> ReportTable:
        builds.append((arguments, options))
        return ReportTable("build", "The build", (Column("x", "x"),), ())

    monkeypatch.setattr(bench_build, "build", build)
    result = tiny.cli(tmp_path, "bench", "tiny", "--only", "build", "--builds", 3, "--jobs", 1)
    assert "The build" in result.stdout
    (arguments, options) = builds[0]
    assert arguments == Artifact.open(own_artifact).manifest.build_arguments
    assert (options["rounds"], options["jobs"]) == (3, 1)
    assert options["environment"]["NPUCOMPILE_HOME"] == str(tmp_path)
    # What is no artifact is a model, with the build's own defaults; nothing else is built for it.
    tiny.cli(tmp_path, "bench", "some-model", "--only", "build")
    assert builds[1][0] == ("some-model",)
    assert pretended == []


def test_a_model_that_is_not_built_is_built_first(
    tiny_checkpoint: Path, tmp_path: Path, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_figures.planning, "plan", lambda options: tiny.planned(Path(options.model)))
    result = tiny.cli(tmp_path, "bench", tiny_checkpoint, "--only", "decode")
    assert result.exit_code == 0, result.output
    assert pretended == ["decode"]
    assert (tmp_path / "artifacts" / "tiny" / "manifest.msgpack").is_file()


def test_nothing_to_measure_and_two_formats_are_refused(tmp_path: Path) -> None:
    assert "no artifact under" in tiny.refused(tmp_path, "bench")
    assert "no artifact under" in tiny.refused(tmp_path, "bench", "--only", "build")
    assert "'neither-nor' is neither a preset nor a directory" in tiny.refused(tmp_path, "bench", "neither-nor")
    assert "at most one of --json and --markdown" in tiny.refused(tmp_path, "bench", "--json", "--markdown")


def test_a_figure_that_fails_does_not_take_the_others_along(
    own_artifact: Path, tmp_path: Path, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_figures = bench_figures.figures

    def broken() -> list[ReportTable]:
        raise SpecError("no streams today")

    monkeypatch.setattr(bench_figures, "figures", lambda *args: {**all_figures(*args), "streams": broken})
    result = tiny.cli(tmp_path, "bench", "tiny", *LITTLE)
    assert result.exit_code == 1
    assert "The prefill\n" in result.stdout
    assert "no streams today" in result.stderr


def test_a_load_beyond_the_context_is_refused_before_anything_is_measured(own_artifact: Path, tmp_path: Path, pretended: list[str]) -> None:
    assert "context of 64" in tiny.refused(tmp_path, "bench", "tiny")
    assert pretended == []
    assert tiny.cli(tmp_path, "bench", "tiny", "--only", "decode").exit_code == 0


def test_loads_are_what_the_options_say(own_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bench.BenchSettings] = []

    def figures(artifact: Artifact, home: Any, settings: bench.BenchSettings, progress: Any) -> dict[str, Any]:
        used.append(settings)
        return {"streams": list}

    monkeypatch.setattr(bench_figures, "figures", figures)
    tiny.cli(tmp_path, "bench", "--only", "streams", *LITTLE)
    assert used[0] == bench.BenchSettings((StreamLoad(1, 6, 4), StreamLoad(2, 6, 4)), 1, 1, 1, 2)


def test_without_the_laboratory_its_figures_are_refused(
    own_artifact: Path, tmp_path: Path, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laboratory.importlib.util, "find_spec", lambda *_: None)
    refusal = "`npucompile bench --only peers` needs the laboratory, which is in the repository and not in the wheel"
    assert refusal in tiny.refused(tmp_path, "bench", "tiny", "--only", "decode,peers")
    assert pretended == []
