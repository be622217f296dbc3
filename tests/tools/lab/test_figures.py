"""tools/lab/figures.py: drafting and other engines are measured with what the command's options say."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.bench.report import Column, ReportTable
from npucompile.tools.bench.streams import StreamLoad
from npucompile.tools.commands import bench
from npucompile.tools.lab import speculation
from npucompile.tools.lab.peers import engines
from npucompile.tools.lab.peers import run as peers

LITTLE = ("--repetitions", 1, "--rounds", 1, "--streams", "1,2", "--tokens", 4, "--prompt-tokens", 6)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What drafting is measured with, instead of measuring it."""
    calls: list[tuple[Any, ...]] = []

    def pretend(*args: Any) -> ReportTable:
        calls.append(args)
        return ReportTable("speculation", "Drafting", (Column("x", "x"),), ({"x": 1.5},))

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
    assert (loads, rounds) == ((StreamLoad(1, 6, 4), StreamLoad(2, 6, 4)), 1)
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


def test_a_named_peer_is_measured_beside_the_artifact(own_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def pretend(*args: Any, **named: Any) -> list[ReportTable]:
        calls.append((*args, named))
        return [ReportTable("peers", "Beside others", (Column("x", "x"),), ({"x": 1.5},))]

    monkeypatch.setattr(peers, "peers", pretend)
    python = f"llama.cpp={sys.executable}"
    result = tiny.cli(tmp_path, "bench", "tiny", "--peer", "vllm", "--peer", "llama.cpp", "--peer-python", python, "--threads", 1, *LITTLE)
    assert result.exit_code == 0, result.output
    artifact, chosen, loads, rounds, named = calls[0]
    assert artifact.path == own_artifact
    assert chosen == peers.choice(("vllm", "llama.cpp"), (python,), None)
    assert (loads, rounds) == ((StreamLoad(1, 6, 4), StreamLoad(2, 6, 4)), 1)
    assert (named["threads"], named["cache"]) == (1, tmp_path / "cache" / "peers")
    assert [word for word in result.stdout.split("\n\n") if "Beside others" in word]
    tiny.cli(tmp_path, "bench", "tiny", "--only", "peers", *LITTLE)
    assert calls[1][1] == peers.PeerChoice()


def test_the_help_names_the_engines() -> None:
    assert bench.PEERS.split(", ") == list(engines.PEERS)
    assert bench.DEFAULT_PEERS.split(", ") == list(engines.DEFAULT)
