"""tools/commands/bringup.py: the rungs as text and as JSON, the report's files, and the exit status."""

from __future__ import annotations

import json

import pytest
from support import faulty, tiny
from support.faulty import FaultyDevice, wrong_results

from npucompile.tools.prove.bringup import rungs


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield faulty.npu_artifact(tmp_path_factory.mktemp("npu"), patch)


@pytest.fixture
def kept_environment(artifact, monkeypatch):
    """The command sets the variables that the artifact plans in this process; here they are set before, and restored."""
    for name, setting in artifact.manifest.environment.items():
        monkeypatch.setenv(name, setting.value)


def test_json_has_the_rungs_that_ran_and_the_report_is_written(tmp_path, artifact, kept_environment):
    result = tiny.cli(tmp_path, "bringup", artifact.path, "--device", "emulated", "--only", "environment", "--only", "serve", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [(rung["name"], rung["passed"], rung["seconds"] > 0) for rung in found["rungs"]] == [
        ("environment", True, True),
        ("serve", True, True),
    ]
    directory = tmp_path / "reports" / artifact.path.name
    assert json.loads((directory / "bringup.json").read_text()) == found
    assert (directory / "bringup.html").read_text().startswith("<!doctype html>")


def test_a_rung_that_fails_ends_the_command_with_status_1(tmp_path, artifact, kept_environment, monkeypatch):
    fault = wrong_results(lambda executable: executable.types == ["FusedInferAttentionScore"])
    monkeypatch.setattr(rungs, "open_device", lambda kind, index=0: FaultyDevice(fault, index=index))
    result = tiny.cli(tmp_path, "bringup", artifact.path, "--device", "emulated", "--only", "operators", "--report", tmp_path / "report")
    assert result.exit_code == 1
    assert "operators    FAILED" in result.stdout
    assert "wrong assumption: Length conventions. (lengths in docs/on-hardware.md)" in result.stdout
    assert (tmp_path / "report" / "bringup.html").is_file()


def test_a_failure_is_said_on_stderr_beside_json(tmp_path, artifact, kept_environment, monkeypatch):
    fault = wrong_results(lambda executable: executable.types == ["FusedInferAttentionScore"])
    monkeypatch.setattr(rungs, "open_device", lambda kind, index=0: FaultyDevice(fault, index=index))
    result = tiny.cli(tmp_path, "bringup", artifact.path, "--device", "emulated", "--only", "operators", "--json")
    (failed,) = json.loads(result.stdout)["rungs"]
    first = failed["failures"][0]
    assert (result.exit_code, result.stderr) == (1, f"operators: {first['what']}: {first['message']}\n")


def test_an_artifact_for_this_machine_has_nothing_to_bring_up(tmp_path, tiny_artifact):
    assert "a bring-up is of an artifact for NPUs" in tiny.refused(tmp_path, "bringup", tiny_artifact)
