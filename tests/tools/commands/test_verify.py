"""tools/commands/verify.py: a verification printed, as JSON, and refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support import tiny

from npucompile.tools.commands import verify

NAMES = ["prefill-b1-q4", "prefill-b1-q16", "decode-b1-q4", "decode-b2-q4", "decode-b4-q4"]


def test_every_bucket_is_ok(tmp_path, own_artifact):
    result = tiny.cli(tmp_path, "verify")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(line.endswith("   ok") and " rows " in line and " logits " in line for line in lines)


def test_json_is_what_was_measured(tmp_path, tiny_artifact):
    measurements = json.loads(tiny.cli(tmp_path, "verify", tiny_artifact, "--json").stdout)
    assert list(measurements) == NAMES
    assert all(set(measured) == {"rows", "logits_error", "state_error", "token_mismatches"} for measured in measurements.values())


def test_a_wrong_executable_fails_it(tmp_path, own_artifact, stub):
    tiny.with_compiled(own_artifact, "stub")
    assert tiny.cli(tmp_path, "verify", "tiny").exit_code == 0
    stub.error = 0.5
    assert "prefill-b1-q4 (stub) against eager rows run alone: logits differ by" in tiny.refused(tmp_path, "verify", "tiny")


def test_a_tampered_file_is_refused_by_its_name(own_artifact, tmp_path):
    for name in tiny.contents(own_artifact):
        with tiny.damaged(own_artifact / name):
            assert str(own_artifact / name) in tiny.refused(tmp_path, "verify", "tiny")


@pytest.fixture
def proved(monkeypatch):
    """What the proof for NPUs was asked, in place of it."""
    calls = []

    def prove(artifact, cache_dir, progress, *, steps, seed):
        calls.append((artifact.path, cache_dir, steps, seed))
        return {"manifest": {"operands": 7.0}, "GE bf16 as lowered": {"tokens": 12.0, "logits_error": 2.5e-6}}

    monkeypatch.setattr(verify, "verify_device", prove)
    return calls


def for_npus(path):
    """Publishes an artifact as one for NPUs."""
    tiny.published(path, lambda before, _: replace(before, target="ascend-a3"))


def test_an_artifact_for_npus_is_proved_check_by_check(tmp_path, own_artifact, proved):
    for_npus(own_artifact)
    result = tiny.cli(tmp_path, "verify", "tiny")
    assert result.exit_code == 0
    *lines, last = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["manifest", "GE bf16 as lowered"]
    assert lines[0].endswith("operands 7   ok")
    assert lines[1].endswith("tokens 12, logits_error 2.5e-06   ok")
    assert last.startswith("proved in ")
    assert proved == [(own_artifact, tmp_path / "cache", 3, 0)]


def test_steps_and_seed_reach_the_proof_for_npus(tmp_path, own_artifact, proved):
    for_npus(own_artifact)
    measurements = json.loads(tiny.cli(tmp_path, "verify", "tiny", "--steps", 5, "--seed", 9, "--json").stdout)
    assert measurements["manifest"] == {"operands": 7.0}
    assert proved[0][2:] == (5, 9)


@pytest.mark.parametrize("option", [("--steps", 2), ("--seed", 0)])
def test_steps_and_seed_are_refused_for_this_machine(tmp_path, own_artifact, proved, option):
    assert "--steps and --seed are for artifacts built for NPUs" in tiny.refused(tmp_path, "verify", "tiny", *option)
    assert not proved


def test_an_artifact_for_several_ranks_is_proved_on_all_of_them(tmp_path, sharded):
    result = tiny.cli(tmp_path, "verify", sharded("tp=2"))
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["prefill-b1-q4", "decode-b1-q4", "decode-b2-q4"]
    assert "on tp=2: logits within" in result.stderr
