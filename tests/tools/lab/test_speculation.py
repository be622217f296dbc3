"""tools/lab/speculation.py: two artifacts that differ only in drafts, on the same prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.tiny import QUIET

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.request import ExecutionRecord
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.bench.report import as_text
from npucompile.tools.bench.serve.outcome import StreamOutcome
from npucompile.tools.bench.streams import Run, StreamLoad
from npucompile.tools.lab import speculation as module
from npucompile.tools.lab.speculation import WITH, WITHOUT, TextLoad, check, read_prompts, row, speculation

TEXTS = tuple((word,) * 9 for word in range(5))


@pytest.fixture(scope="module")
def drafting(tiny_artifact: Path) -> Artifact:
    return Artifact.open(tiny_artifact)


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("plain") / "tiny-k0"
    tiny.built(tiny.planned(tiny_checkpoint, num_speculative_tokens=0), out)
    return Artifact.open(out)


def changed(artifact: Artifact, **fields: Any) -> Artifact:
    return Artifact(artifact.path, replace(artifact.manifest, **fields), artifact.digest)


def record(steps: int, *accepted: int) -> ExecutionRecord:
    drafted = steps * len(accepted)
    return ExecutionRecord(1.0, 2.0, 3.0, (), (), 0, 0, verify_steps=steps, drafted_tokens=drafted, accepted_per_position=accepted)


def run(seconds: float, token_ids: tuple[int, ...], *records: ExecutionRecord) -> Run:
    return Run((StreamOutcome(0, 0.0, 0.0, seconds, 4, token_ids=token_ids),), records=records)


# --- the text ---


def test_every_round_has_the_next_prompts() -> None:
    load = TextLoad(2, 4, 8, texts=TEXTS)
    assert load.prompts(50) == [[0] * 4, [1] * 4]
    assert replace(load, round=1).prompts(50) == [[2] * 4, [3] * 4]
    assert replace(load, round=2).prompts(50) == [[4] * 4, [0] * 4]
    assert replace(load, prompt_tokens=20).prompts(50) == [[0] * 9, [1] * 9], "a text that is shorter is taken whole"


def test_prompts_are_the_lines_of_a_file(tmp_path: Path, tiny_artifact: Path) -> None:
    codec = TextTokenizer.load(tiny_artifact / str(Artifact.open(tiny_artifact).manifest.tokenizer))
    (tmp_path / "prompts.txt").write_text("a bc\n\n  \nd\n")
    assert read_prompts(tmp_path / "prompts.txt", codec) == (tuple(codec.encode("a bc")), tuple(codec.encode("d")))
    (tmp_path / "none.txt").write_text("\n \n")
    with pytest.raises(SpecError, match=r"none\.txt has no prompts; legal is a text file with one per line"):
        read_prompts(tmp_path / "none.txt", codec)


# --- the artifacts ---


def test_artifacts_that_differ_in_more_than_drafts_are_refused(drafting: Artifact, plain: Artifact) -> None:
    check(drafting, plain)
    for pair, message in (((plain, plain), "drafts 0 tokens a step and .* 0"), ((drafting, drafting), "drafts 3 tokens a step and .* 3")):
        with pytest.raises(SpecError, match=rf"{message}; legal are at least 1, and 0"):
            check(*pair)
    for field, value in (("dtype", "bf16"), ("backend", "inductor"), ("source_digest", "other")):
        with pytest.raises(SpecError, match=rf"{field} of .* is {value}, of .*; legal are equal ones"):
            check(changed(drafting, **{field: value}), plain)


# --- the figures ---


def test_a_row_is_taken_round_by_round() -> None:
    same, other = (1, 2, 3, 4), (1, 2, 3, 5)
    runs = {
        WITH: [run(1.0, same, record(4, 3, 1)), run(2.0, same, record(4, 1, 1))],
        WITHOUT: [run(2.0, same), run(6.0, other)],
    }
    cells = row(StreamLoad(1, 4, 4), "engine", runs)
    assert (cells["streams"], cells["path"], cells["equal"]) == (1, "engine", "1 of 2")
    assert [getattr(cells["with_tokens_per_s"], name) for name in ("low", "high")] == [2.0, 4.0]
    assert [getattr(cells["without_tokens_per_s"], name) for name in ("low", "high")] == [4 / 6, 2.0]
    assert [getattr(cells["gain"], name) for name in ("low", "high")] == [2.0, 3.0]
    assert cells["acceptance_length"] == 1 + 6 / 8
    assert cells["acceptance_rates"] == "0.50, 0.25"
    unseen = row(StreamLoad(1, 4, 4), "websocket", {name: [run(1.0, same)] for name in (WITH, WITHOUT)})
    assert not {"acceptance_length", "acceptance_rates"} & set(unseen)


def test_both_paths_of_both_artifacts_say_the_same_tokens(drafting: Artifact, plain: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, list[Run]]] = []
    monkeypatch.setattr(module, "row", lambda load, path, runs: calls.append(runs) or row(load, path, runs))
    texts = tuple(tuple(range(40 + 7 * i, 60 + 7 * i)) for i in range(6))
    table = speculation(drafting, plain, texts, [StreamLoad(2, 12, 16)], 2, QUIET)
    assert [(line["streams"], line["path"], line["equal"]) for line in table.rows] == [(2, "engine", "4 of 4"), (2, "websocket", "4 of 4")]
    engine, websocket = calls
    for name in (WITH, WITHOUT):
        assert [run.token_ids for run in engine[name]] == [run.token_ids for run in websocket[name]]
        # A round of warming comes first, so these are the second and the third pair of prompts.
        assert len({ids for run in engine[name] for ids in run.token_ids}) == 4
    length, rates = table.rows[0]["acceptance_length"], str(table.rows[0]["acceptance_rates"])
    assert isinstance(length, float)
    assert 1 < length < 4
    assert length == pytest.approx(1 + sum(map(float, rates.split(", "))), abs=0.02)
    text = as_text(table)
    assert "k = 3; 16 tokens generated by each stream after up to 12 of its prompt" in text
    assert "6 prompts" in text


def test_each_width_of_an_artifact_takes_its_turn(tiny_checkpoint: Path, plain: Artifact, tmp_path: Path) -> None:
    tiny.built(tiny.planned(tiny_checkpoint, draft_widths=(1, 4), buckets=(2,)), tmp_path / "several")
    sides = {WITH: Artifact.open(tmp_path / "several"), WITHOUT: plain}
    runs = module._through_engines(sides, TextLoad(2, 12, 16, texts=tuple(tuple(range(40 + i, 60 + i)) for i in range(4))), 1)
    assert set(runs) == {WITH, WITHOUT, 1, 4}
    assert len({tuple(each.token_ids) for own in runs.values() for each in own}) == 1
    steps = {width: {name for each in runs[width] for own in each.records for name, _ in own.decode_steps} for width in (1, 4)}
    assert steps == {1: {"decode-b2-q1"}, 4: {"decode-b2-q4"}}
    assert "of_fixed" in row(StreamLoad(2, 12, 16), "engine", runs)


def test_a_load_that_does_not_fit_is_refused_before_anything_runs(drafting: Artifact, plain: Artifact) -> None:
    with pytest.raises(SpecError, match="context of 64"):
        speculation(drafting, plain, TEXTS, [StreamLoad(1, 60, 60)], 1, QUIET)
