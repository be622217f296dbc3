"""tools/inspection/cost.py: the table of a step's time says what the estimate says, for graphs of NPUs only."""

from __future__ import annotations

import json

import pytest
from support import ge_artifacts, tiny
from support import ge_bodies as gb

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.ascend.cost.timing import CAUSES
from npucompile.lowering.ascend.link import link
from npucompile.tools.inspection import cost


@pytest.fixture(scope="module")
def ge_file(tmp_path_factory):
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    return link(*gb.two_kinds(4), ta)


@pytest.fixture
def artifact(own_artifact, ge_file):
    return ge_artifacts.published(own_artifact, ge_file)


def numbers(line: str) -> list[float]:
    return [float(word.replace(",", "")) for word in line.split() if word.replace(".", "").replace(",", "").isdigit()]


def test_rows_add_up_to_the_step(artifact):
    view = cost.view(artifact, ge_artifacts.entry(artifact), 16)
    step = view.data["step_ms"]
    assert view.lines[0].startswith(f"decode-b4-q4 on ascend910_93, 16 cached tokens a request: {step:.2f} ms a step (estimate)")
    start = next(i for i, line in enumerate(view.lines) if line.startswith("all"))
    assert view.lines[2].split()[3:] == ["launches", "total", *CAUSES]
    totals = [numbers(line.replace("x 2", "")) for line in view.lines[3 : start + 1]]
    assert {line.split()[0] for line in view.lines[3:start]} == {"attention", "deltanet"}
    assert sum(row[0] for row in totals[:-1]) == totals[-1][0] == view.data["launches"]
    assert sum(row[1] for row in totals[:-1]) == pytest.approx(totals[-1][1], abs=0.02)
    assert totals[-1][1] == pytest.approx(step, abs=0.01)


def test_inspect_shows_it(tmp_path, artifact):
    """As a table, as JSON, as a picture, and within the JSON of a bucket."""
    shown = tiny.cli(tmp_path, "inspect", artifact.path, "--bucket", "4", "--cost", "--html", tmp_path / "step.html").stdout
    told = json.loads(tiny.cli(tmp_path, "inspect", artifact.path, "--bucket", "4", "--cost", "--json").stdout)
    assert f"{told['step_ms']:.2f} ms a step" in shown
    assert told["context"] == tiny.CONTEXT // 2
    longer = json.loads(tiny.cli(tmp_path, "inspect", artifact.path, "--bucket", "4", "--cost", "--context", tiny.CONTEXT, "--json").stdout)
    assert longer["step_ms"] > told["step_ms"]
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")
    (bucket,) = json.loads(tiny.cli(tmp_path, "inspect", artifact.path, "--bucket", "4", "--json").stdout)["buckets"]
    assert bucket["cost"]["step_ms"] == told["step_ms"]
    assert bucket["launches"] == told["launches"]
    assert bucket["operators"] == sum(bucket["census"].values()) > bucket["launches"]


def test_what_it_cannot_show_is_refused(tmp_path, artifact, tiny_artifact):
    assert "legal is 1 to" in tiny.refused(tmp_path, "inspect", artifact.path, "--bucket", "4", "--cost", "--context", "0")
    assert "--context is given without --cost" in tiny.refused(tmp_path, "inspect", artifact.path, "--context", "5")
    assert "not compiled; --cost reads graphs built for NPUs" in tiny.refused(tmp_path, "inspect", artifact.path, "--bucket", "1", "--cost")
    built = Artifact.open(tiny_artifact)
    with pytest.raises(SpecError, match="--cost reads graphs built for NPUs"):
        cost.step_cost(built, ge_artifacts.entry(built))
