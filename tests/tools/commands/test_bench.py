from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import registry
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.bench import build as bench_build
from npucompile.tools.bench import machine
from npucompile.tools.bench.report import Column, Table
from npucompile.tools.bench.streams import Load
from npucompile.tools.commands import bench
from npucompile.tools.lab import peer, speculation
from npucompile.tools.lab.peers import run as peers

LITTLE = ("--repetitions", 1, "--rounds", 1, "--streams", "1,2", "--tokens", 4, "--prompt-tokens", 6)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every figure of an artifact is a table with one cell; the names of those that are measured."""
    measured: list[str] = []

    def figures(artifact: Artifact, *_: Any) -> dict[str, Any]:
        def figure(name: str) -> list[Table]:
            measured.append(name)
            return [Table(name, f"The {name}", (Column("x", "x"),), ({"x": 1.5},))]

        return {name: (lambda name=name: figure(name)) for name in bench.FIGURES if name != "build"}

    monkeypatch.setattr(bench, "figures", figures)
    return measured


def test_figures_and_counts_are_read() -> None:
    assert bench.figure_names("peer, decode,decode") == ("decode", "peer")
    assert bench.counts("1, 4,16") == (1, 4, 16)


@pytest.mark.parametrize("text", ["", "decode,", "decoding", "decode;peer"])
def test_other_figures_are_refused(text: str) -> None:
    with pytest.raises(
        SpecError, match="legal is a comma-separated list of build, load, decode, prefill, streams, overhead, speculation, peer, peers"
    ):
        bench.figure_names(text)


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


def test_every_figure_of_an_artifact_can_be_measured(tiny_artifact: Path) -> None:
    settings = bench.Settings((Load(1, 6, 4),), 1, 1, 1, 1)
    home = bench.Home(Path("home"), {})
    figures = bench.figures(Artifact.open(tiny_artifact), home, settings, bench.Progress(quiet=True))
    assert ("build", *figures, "kernels") == bench.FIGURES


def test_builds_are_measured_only_when_named(own_artifact: Path, tmp_path: Path, pretended: list[str]) -> None:
    assert tiny.cli(tmp_path, "bench", *LITTLE).exit_code == 0
    assert pretended == ["load", "decode", "prefill", "streams", "peer"]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What drafting is measured with, instead of measuring it."""
    calls: list[tuple[Any, ...]] = []

    def pretend(*args: Any) -> Table:
        calls.append(args)
        return Table("speculation", "Drafting", (Column("x", "x"),), ({"x": 1.5},))

    monkeypatch.setattr(speculation, "speculation", pretend)
    return calls


def test_drafting_is_compared_with_the_same_artifact_without_it(
    own_artifact: Path, tmp_path: Path, compared: list[tuple[Any, ...]]
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    arguments = ("bench", "tiny", "--only", "speculation", "--prompts", tmp_path / "prompts.txt", *LITTLE)
    result = tiny.cli(tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    assert "Drafting\n" in result.stdout
    drafting, plain, texts, loads, rounds, _ = compared[0]
    assert (drafting.path, plain.path) == (own_artifact, own_artifact.with_name("tiny-k0"))
    assert (drafting.manifest.limits.drafts, plain.manifest.limits.drafts) == (3, 0)
    words = [side.manifest.build_arguments for side in (drafting, plain)]
    with_drafts, without = (dict(zip(words_of_one[1::2], words_of_one[2::2], strict=True)) for words_of_one in words)
    assert {**with_drafts, "--speculative-tokens": "0"} == without
    assert words[0][0] == words[1][0]
    codec = TextTokenizer.load(own_artifact / str(drafting.manifest.tokenizer))
    assert texts == (tuple(codec.encode("one")), tuple(codec.encode("two")))
    assert (loads, rounds) == ((Load(1, 6, 4), Load(2, 6, 4)), 1)
    # Once it is there it is brought up to date, and nothing is left to do.
    before = tiny.contents(plain.path)
    tiny.cli(tmp_path, *arguments)
    assert tiny.contents(plain.path) == before
    assert len(compared) == 2


def test_drafting_needs_drafts_and_text(own_artifact: Path, tmp_path: Path, compared: list[tuple[Any, ...]]) -> None:
    arguments = ("bench", "tiny", "--only", "speculation", *LITTLE)
    assert "no prompts for tiny: " in tiny.refused(tmp_path, *arguments)
    assert "legal is --prompts FILE, one prompt a line" in tiny.refused(tmp_path, *arguments, "--prompts", tmp_path / "absent.txt")
    (tmp_path / "prompts.txt").write_text("one\n")
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, tokenizer=None))
    assert "has no tokenizer; drafting is measured on text" in tiny.refused(tmp_path, *arguments, "--prompts", tmp_path / "prompts.txt")
    limits = replace(Artifact.open(own_artifact).manifest.limits, drafts=0, slots_per_request=1)
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, limits=limits))
    assert "tiny drafts nothing; legal is one built with --speculative-tokens of at least 1" in tiny.refused(tmp_path, *arguments)
    assert compared == []


def test_the_bundled_models_prompts_lie_beside_it() -> None:
    model = registry.find("qwen3.5-tiny")
    assert model.checkpoint_dir is not None
    lines = (model.checkpoint_dir / "prompts.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) >= 16


def test_a_missing_peer_is_left_out_or_refused(
    own_artifact: Path, tmp_path: Path, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "installed", lambda: False)
    result = tiny.cli(tmp_path, "bench", *LITTLE)
    assert "no peer: the peer is transformers" in result.stderr
    assert pretended == ["load", "decode", "prefill", "streams"]
    assert "transformers, which is not installed" in tiny.refused(tmp_path, "bench", "--only", "decode,peer")
    assert pretended == ["load", "decode", "prefill", "streams"]


def test_a_named_peer_is_measured_beside_the_artifact_with_and_without_drafts(
    own_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def pretend(*args: Any, **named: Any) -> list[Table]:
        calls.append((*args, named))
        return [Table("peers", "Beside others", (Column("x", "x"),), ({"x": 1.5},))]

    monkeypatch.setattr(peers, "peers", pretend)
    python = f"llama.cpp={sys.executable}"
    result = tiny.cli(tmp_path, "bench", "tiny", "--peer", "vllm", "--peer", "llama.cpp", "--peer-python", python, "--threads", 1, *LITTLE)
    assert result.exit_code == 0, result.output
    artifact, plain, chosen, loads, rounds, named = calls[0]
    assert (artifact.path, plain.path) == (own_artifact, own_artifact.with_name("tiny-k0"))
    assert (artifact.manifest.limits.drafts, plain.manifest.limits.drafts) == (3, 0)
    assert chosen == peers.choice(("vllm", "llama.cpp"), (python,), None)
    assert (loads, rounds) == ((Load(1, 6, 4), Load(2, 6, 4)), 1)
    assert (named["threads"], named["cache"]) == (1, tmp_path / "cache" / "peers")
    assert [word for word in result.stdout.split("\n\n") if "Beside others" in word]
    # An artifact without drafts is measured once.
    tiny.published(own_artifact, lambda manifest, _: replace(manifest, limits=replace(manifest.limits, drafts=0, slots_per_request=1)))
    tiny.cli(tmp_path, "bench", "tiny", "--only", "peers", *LITTLE)
    assert calls[1][1:3] == (None, peers.Choice())


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

    def build(arguments: tuple[str, ...], **options: Any) -> Table:
        builds.append((arguments, options))
        return Table("build", "The build", (Column("x", "x"),), ())

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
    monkeypatch.setattr(bench.planning, "plan", lambda options: tiny.planned(Path(options.model)))
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
    all_figures = bench.figures

    def broken() -> list[Table]:
        raise SpecError("no streams today")

    monkeypatch.setattr(bench, "figures", lambda *args: {**all_figures(*args), "streams": broken})
    result = tiny.cli(tmp_path, "bench", "tiny", *LITTLE)
    assert result.exit_code == 1
    assert "The prefill\n" in result.stdout
    assert "no streams today" in result.stderr


def test_a_load_beyond_the_context_is_refused_before_anything_is_measured(own_artifact: Path, tmp_path: Path, pretended: list[str]) -> None:
    assert "context of 64" in tiny.refused(tmp_path, "bench", "tiny")
    assert pretended == []
    assert tiny.cli(tmp_path, "bench", "tiny", "--only", "decode").exit_code == 0


def test_loads_are_what_the_options_say(own_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bench.Settings] = []

    def figures(artifact: Artifact, home: Any, settings: bench.Settings, progress: Any) -> dict[str, Any]:
        used.append(settings)
        return {"streams": list}

    monkeypatch.setattr(bench, "figures", figures)
    tiny.cli(tmp_path, "bench", "--only", "streams", *LITTLE)
    assert used[0] == bench.Settings((Load(1, 6, 4), Load(2, 6, 4)), 1, 1, 1, 2)


def test_a_figure_is_measured_on_a_thread_that_is_gone_afterwards() -> None:
    thread = bench._alone(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    with pytest.raises(SpecError, match="of the figure"):
        bench._alone(lambda: (_ for _ in ()).throw(SpecError("of the figure")))
