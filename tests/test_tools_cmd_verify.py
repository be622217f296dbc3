"""tools/cmd_verify.py: a proof repeated, printed, refused."""

from __future__ import annotations

import json

import pytest

from npucompile.lowering.artifact import Artifact

NAMES = ["prefill-b1-q4", "prefill-b1-q16", "decode-b1-q1", "decode-b2-q1", "decode-b4-q1"]


@pytest.fixture
def stub(tiny, monkeypatch):
    return tiny.Stub().install(monkeypatch)


def test_every_bucket_is_ok(tiny, tmp_path, own_artifact):
    result = tiny.cli(tmp_path, "verify")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(line.endswith("   ok") and " rows " in line and " logits " in line for line in lines)


def test_json_is_what_was_measured(tiny, tmp_path, tiny_artifact):
    found = json.loads(tiny.cli(tmp_path, "verify", tiny_artifact, "--json").stdout)
    assert list(found) == NAMES
    assert all(set(measured) == {"rows", "logits_error", "state_error", "token_mismatches"} for measured in found.values())


def test_a_wrong_executable_fails_it(tiny, tmp_path, own_artifact, stub):
    tiny.with_compiled(own_artifact, "stub")
    assert tiny.cli(tmp_path, "verify", "tiny").exit_code == 0
    stub.error = 0.5
    assert "prefill-b1-q4 (stub) against the eager graph: logits differ by" in tiny.refused(tmp_path, "verify", "tiny")


def test_a_tampered_file_is_refused_by_its_name(tiny, own_artifact, tmp_path):
    for name in tiny.contents(own_artifact):
        with tiny.damaged(own_artifact / name):
            assert str(own_artifact / name) in tiny.refused(tmp_path, "verify", "tiny")


def test_a_missing_file_is_refused_by_its_name(tiny, own_artifact, tmp_path):
    weights = own_artifact / Artifact.open(own_artifact).manifest.weights
    weights.unlink()
    assert f"{weights} is missing; the manifest says" in tiny.refused(tmp_path, "verify", "tiny")


def test_another_toolchains_code_is_not_run(tiny, own_artifact, tmp_path):
    tiny.with_compiled(own_artifact, toolchain={**Artifact.open(own_artifact).manifest.toolchain, "machine": "pdp11"})
    assert "machine was 'pdp11' and is" in tiny.refused(tmp_path, "verify", "tiny")
