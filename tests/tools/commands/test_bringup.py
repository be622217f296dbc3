"""tools/commands/bringup.py: the rungs as text and as JSON, the report's files, and the exit status."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from support import bringups, tiny
from support.faulty import CHILDREN, Opens, is_alone, wrong_results

from npucompile.tools.commands import bringup
from npucompile.tools.prove.bringup import bisect
from npucompile.tools.ranks.rank_settings import RankSettings


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return bringups.small_artifact(tmp_path_factory)


@pytest.fixture
def kept_environment(artifact, monkeypatch):
    """The command sets the variables that the artifact plans in this process; here they are set before, and restored."""
    for name, setting in artifact.manifest.environment.items():
        monkeypatch.setenv(name, setting.value)


@pytest.fixture
def wrong_attention(kept_environment, monkeypatch):
    opens = Opens(wrong_results(is_alone("FusedInferAttentionScore")))
    monkeypatch.setattr(bringup, "RankSettings", functools.partial(RankSettings, open_device=opens))
    monkeypatch.setenv("PYTHONPATH", CHILDREN["PYTHONPATH"])


def test_a_rung_that_fails_ends_the_command_with_status_1_and_is_said(tmp_path, artifact, wrong_attention):
    only = ("--only", "operators:FusedInfer", "--report", tmp_path / "report")
    result = tiny.cli(tmp_path, "bringup", artifact.path, "--device", "emulated", *only)
    assert result.exit_code == 1
    assert "operators    FAILED" in result.stdout
    assert "wrong assumption: Length conventions. (lengths in docs/on-hardware.md)" in result.stdout
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"bringup.html", "bringup.json", "bringup.jsonl", "bringup.tar.xz"}
    with tarfile.open(tmp_path / "report" / "bringup.tar.xz") as sent:
        assert {"bringup.json", "bringup.jsonl", "machine.json"} <= set(sent.getnames())
    # The same beside JSON; what was judged is not run again, but for what failed.
    result = tiny.cli(tmp_path, "bringup", artifact.path, "--device", "emulated", *only, "--json", "--resume")
    (failed,) = json.loads(result.stdout)["rungs"]
    first = failed["failures"][0]
    assert (result.exit_code, result.stderr) == (1, f"operators: {first['what']}: {first['message']}\n")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_command_ends_with_its_report_and_the_next_one_goes_on(tmp_path, artifact, kept_environment, number):
    code = "import signal; from npucompile.tools.cli import main; signal.signal(2, signal.default_int_handler); main()"
    options = ("--device", "emulated", "--only", "environment", "--only", "operators:MatMul", "--only", "serve", "--json")
    command = [sys.executable, "-c", code, "bringup", str(artifact.path), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NPUCOMPILE_HOME": str(tmp_path)})
    report = tmp_path / "reports" / artifact.path.name
    findings = report / "bringup.jsonl"
    while not (findings.is_file() and len(findings.read_text().splitlines()) > 4 + (number == signal.SIGKILL)):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    said = process.communicate(timeout=300)[0]
    # What is killed says nothing, and its last line may be a part.
    whole = [json.loads(line) for line in findings.read_text().splitlines()[1:-1]]
    before = {line["case"] for line in whole if line["rung"] == "operators"} - {""}
    if number != signal.SIGKILL:
        found = json.loads(said)
        assert (process.returncode, found["passed"]) == (1, False)
        assert json.loads((report / "bringup.json").read_text()) == found
        # Where others have the processor the signal may come when the operators are done; what would not end is not run.
        assert [(rung["name"], rung["failures"]) for rung in found["rungs"]][:2] == [("environment", []), ("operators", [])]
        assert not all(rung["finished"] for rung in found["rungs"]) or len(found["rungs"]) < 3
        before = {timing["what"] for timing in found["rungs"][1]["timings"]}
    assert before
    result = tiny.cli(tmp_path, "bringup", artifact.path, *options, "--resume")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [(rung["name"], rung["passed"], rung["seconds"] > 0) for rung in found["rungs"]] == [
        ("environment", True, True),
        ("operators", True, True),
        ("serve", True, True),
    ]
    assert json.loads((report / "bringup.json").read_text()) == found
    assert (report / "bringup.html").read_text().startswith("<!doctype html>")
    cases = [json.loads(line)["case"] for line in findings.read_text().splitlines()[1:]]
    assert all(cases.count(what) == 1 for what in before)


def test_an_interrupt_is_said_and_ends_with_what_was_found(tmp_path, artifact, kept_environment, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bringup.Bringup, "run", interrupted)
    result = tiny.cli(tmp_path, "bringup", artifact.path, "--device", "emulated")
    assert result.exit_code == 1
    assert "interrupted; --resume goes on" in result.stderr
    assert (tmp_path / "reports" / artifact.path.name / "bringup.json").is_file()


def test_a_bisection_says_each_trial_and_keeps_them(tmp_path, artifact, kept_environment, monkeypatch):
    trials = [
        bisect.BisectTrial("", "buckets", "fails"),
        bisect.BisectTrial("nz", "buckets", "passes"),
        bisect.BisectTrial("aiv", "buckets", "not set"),
    ]
    monkeypatch.setattr(bisect, "bisect", lambda bringup, bucket: iter(trials))
    command = ("bringup", artifact.path, "--device", "emulated", "--bisect", "decode-b1-q2", "--report", tmp_path)
    result = tiny.cli(tmp_path, *command)
    assert result.exit_code == 1
    assert [line.split()[:4] for line in result.stdout.splitlines()[:3]] == [
        ["buckets", "as", "built", "fails"],
        ["buckets", "without", "nz", "passes"],
        ["buckets", "without", "aiv", "not"],
    ]
    assert result.stdout.splitlines()[3].endswith(f"npucompile serve {artifact.path} --off nz")
    assert [trial["outcome"] for trial in json.loads((tmp_path / "bisect.json").read_text())["trials"]] == ["fails", "passes", "not set"]
    del trials[:]
    trials.append(bisect.BisectTrial("", "buckets", "passes"))
    assert tiny.cli(tmp_path, *command, "--json").exit_code == 0


def test_an_artifact_for_this_machine_has_nothing_to_bring_up(tmp_path, tiny_artifact):
    assert "a bring-up is of an artifact for NPUs" in tiny.refused(tmp_path, "bringup", tiny_artifact)
