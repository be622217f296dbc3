"""tools/advisor/plan/auto.py: the buckets of a build are those that its traffic wants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.plan.auto import chosen, said
from npucompile.tools.advisor.plan.buckets import evaluate, middle, step_seconds
from npucompile.tools.advisor.plan.predict import predict
from npucompile.tools.advisor.plan.published import case_of
from npucompile.tools.cli import main

ROW = "qwen3-32b-a3x2-mix-2k-2k-50ms"


def test_they_serve_the_rows_traffic_as_well_as_the_published_ones():
    case = case_of(ROW)
    prediction = predict(case)
    seconds = step_seconds(case, middle(prediction, case))
    own, published = (evaluate(b, prediction.trace.steps, seconds) for b in (chosen("auto", "qwen3-32b", ROW), case.decode.buckets))
    assert own.buckets[-1] == case.serving.max_running
    assert own.seconds <= published.seconds * 1.006
    assert "--buckets auto: " in said(own.buckets, "auto")


def test_a_file_of_plan_names_them(tmp_path: Path) -> None:
    file = tmp_path / "buckets.json"
    file.write_text(json.dumps({"buckets": [2, 5, 9]}))
    assert chosen(f"auto:{file}", "any", None) == (2, 5, 9)
    for text in ("{}", '{"buckets": ["2"]}', '{"buckets": [3, 2]}', "no"):
        file.write_text(text)
        with pytest.raises(SpecError, match=r"has no list of buckets|does not increase"):
            chosen(f"auto:{file}", "any", None)
    with pytest.raises(SpecError, match="No such file"):
        chosen(f"auto:{tmp_path / 'none'}", "any", None)


@pytest.mark.parametrize("words", [("qwen3-32b",), ("qwen3.5-27b", "--deployment", "qwen35-27b-a3x8-mix-ht-128k")])
def test_a_build_without_traffic_says_what_it_needs(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["build", *words, "--buckets", "auto"])
    assert result.exit_code == 1
    assert "how many requests of what lengths there are" in " ".join(result.output.split())


def test_a_build_takes_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from npucompile.tools.builder import build_all

    asked: list[object] = []
    monkeypatch.setattr(build_all, "build_all", lambda model, options, *rest, **more: asked.append(options["buckets"]) or [])
    file = tmp_path / "buckets.json"
    file.write_text(json.dumps({"buckets": [1, 3]}))
    result = CliRunner().invoke(main, ["build", "qwen3.5-tiny", "--buckets", f"auto:{file}", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert asked == [(1, 3)]
