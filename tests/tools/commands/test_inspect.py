"""tools/commands/inspect.py: one view at a time, of one bucket or of all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support import tiny

NAMES = ["prefill-b1-q4", "prefill-b1-q16", "decode-b1-q4", "decode-b2-q4", "decode-b4-q4"]


def test_a_stage_is_one_graphs(tmp_path, tiny_artifact):
    assert "name it with --bucket, one of prefill-b1-q4" in tiny.refused(tmp_path, "inspect", tiny_artifact, "--stage", "lowered")
    assert tiny.cli(tmp_path, "inspect", tiny_artifact, "--bucket", "4", "--stage", "compiled").exit_code == 2


def test_nothing_to_inspect_is_said(tmp_path):
    assert "`npucompile build MODEL` makes one" in tiny.refused(tmp_path, "inspect")


@pytest.mark.parametrize("view", ["collectives", "census"])
def test_views_are_of_one_bucket_or_of_all(tmp_path, tiny_artifact, view):
    def shown(*words):
        return tiny.cli(tmp_path, "inspect", tiny_artifact, f"--{view}", *words).stdout

    assert shown("--bucket", "4").startswith("decode-b4-q4: ")
    assert json.loads(shown("--bucket", "4", "--json"))["bucket"] == "decode-b4-q4"
    assert [part.split(":")[0] for part in shown().split("\n\n")] == NAMES
    assert [entry["bucket"] for entry in json.loads(shown("--json"))] == NAMES


def test_one_thing_is_shown_at_a_time(tmp_path, tiny_artifact):
    message = tiny.refused(tmp_path, "inspect", tiny_artifact, "--memory", "--census")
    assert "--memory and --census are given together; legal is one of --stage, --collectives, --memory, --environment, --census" in message


@pytest.mark.parametrize(
    ("view", "message"), [("environment", "sets no environment variables"), ("memory", "has no plan of a rank's memory")]
)
def test_what_an_artifact_for_this_machine_has_not_is_refused(tmp_path, tiny_artifact, view, message):
    assert message in tiny.refused(tmp_path, "inspect", tiny_artifact, f"--{view}")


def test_a_pair_is_checked_before_it_is_served(tmp_path, tiny_artifact):
    shown = tiny.cli(tmp_path, "inspect", tiny_artifact, "--pair", tiny_artifact, "--context", "17")
    assert shown.exit_code == 0, shown.output
    assert "bytes for 17 tokens" in shown.stdout
    data = json.loads(tiny.cli(tmp_path, "inspect", tiny_artifact, "--pair", tiny_artifact, "--context", "17", "--json").stdout)
    assert data["request_bytes"] == 16 * data["token_bytes"] + data["state_bytes"]
    other = tiny.published(tiny.copied(tiny_artifact, tmp_path / "other"), lambda manifest, _: replace(manifest, source_digest="another"))
    message = tiny.refused(tmp_path, "inspect", tiny_artifact, "--pair", other.path)
    assert "the prefill and the decode server differ: model: qwen3_5 in f32" in message
    decodes = tiny.published(
        tiny.copied(tiny_artifact, tmp_path / "decodes"),
        lambda manifest, _: replace(manifest, graphs=tuple(entry for entry in manifest.graphs if entry.bucket.kind == "decode")),
    )
    assert "--role prefill: " in tiny.refused(tmp_path, "inspect", decodes.path, "--pair", tiny_artifact)
    assert "--context is given without --cost or --pair" in tiny.refused(tmp_path, "inspect", tiny_artifact, "--context", "1")
