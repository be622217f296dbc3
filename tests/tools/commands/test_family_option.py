"""tools/commands/family_option.py: what `--family` builds is recorded, goes stale with its file, and runs without it."""

from __future__ import annotations

import json
import shutil

import pytest
from support import own_family, tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.cli import COMMANDS, main

SMALL = ("--buckets", "1", "--prefill", "4", "--max-model-len", "32", "--dtype", "float32", "--backend", "eager")
IDS = ("--token-ids", "1,2,3,4,5", "--max-tokens", 4, "--ignore-eos", "--json")


@pytest.fixture
def written(tmp_path):
    return own_family.write(tmp_path)


def build(home, checkpoint, file):
    result = tiny.cli(home, "build", checkpoint, "--family", file, *SMALL, "--out", home / "out")
    assert result.exit_code == 0, result.output
    return result.stderr


def tokens(home, *arguments):
    result = tiny.cli(home, "generate", *arguments, *IDS)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["token_ids"]


def test_the_artifact_names_its_file_and_goes_stale_with_it(tmp_path, written):
    checkpoint, file = written
    out = tmp_path / "out"
    build(tmp_path, checkpoint, file)
    first = Artifact.open(out).manifest
    record = first.model["family_file"]
    assert (record["name"], record["path"], record["text"]) == ("own.py", str(file), own_family.FAMILY)
    assert "is up to date" in build(tmp_path, checkpoint, file)
    shown = json.loads(tiny.cli(tmp_path, "inspect", out, "--json").stdout)["model"]["family_file"]
    assert shown == {name: value for name, value in record.items() if name != "text"}
    assert f"family of {file}, sha256 {record['sha256'][:16]}" in tiny.cli(tmp_path, "inspect", out).stdout

    # The same names and shapes, and other numbers.
    file.write_text(own_family.FAMILY.replace("    norm_offset = 0.0", "    norm_offset = 0.5"), encoding="utf-8")
    for arguments in (("verify", out), ("generate", out, "--family", file, *IDS), ("serve", out, "--family", file, "--no-build")):
        message = tiny.refused(tmp_path, *arguments)
        assert record["sha256"][:16] in message
        assert "build it again" in message
    before = tokens(tmp_path, out)
    assert "3 buckets" not in build(tmp_path, checkpoint, file)
    second = Artifact.open(out).manifest
    assert second.model["family_file"]["sha256"] != record["sha256"]
    assert {entry.stamp for entry in first.graphs}.isdisjoint(entry.stamp for entry in second.graphs)
    assert second.weights == first.weights
    assert tokens(tmp_path, out) != before
    assert tokens(tmp_path, out) == tokens(tmp_path, checkpoint, "--family", file, "--dtype", "float32")


def test_nothing_that_runs_an_artifact_needs_the_file(tmp_path, written):
    checkpoint, file = written
    build(tmp_path, checkpoint, file)
    want = tokens(tmp_path, tmp_path / "out", "--family", file)
    file.unlink()
    assert tokens(tmp_path, tmp_path / "out") == want
    assert tiny.cli(tmp_path, "verify", tmp_path / "out").exit_code == 0
    assert "own.py does not exist" in tiny.refused(tmp_path, "generate", tmp_path / "out", "--dtype", "float32", *IDS)


def test_an_artifact_of_another_family_is_refused(tmp_path, written, tiny_artifact):
    message = tiny.refused(tmp_path, "generate", tiny_artifact, "--family", written[1], *IDS)
    assert f"{tiny_artifact} was built with npucompile's family qwen3_5, not {written[1]}; build it again" in message


def test_a_checkpoint_of_no_family_says_how_to_bring_one(tmp_path, written):
    shutil.copytree(written[0], tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"qwen2"', '"qwen9"'))
    message = tiny.refused(tmp_path, "build", tmp_path / "other")
    assert "model_type 'qwen9' is not supported" in message
    assert "--family FILE.py names a family of your own" in message


def test_every_command_that_takes_a_checkpoint_takes_a_family():
    takers = [name for name in COMMANDS if any("--family" in param.opts for param in main.get_command(None, name).params)]
    assert sorted(takers) == ["bench", "build", "generate", "models", "quantize", "serve"]


def test_the_other_commands_take_it(tmp_path, written):
    checkpoint, file = written
    assert tiny.cli(tmp_path, "models", "--family", file).stdout == "own.py: family qwen2, for model_type qwen2\n"
    reduced = tiny.cli(tmp_path, "models", checkpoint, "--family", file, "--reduce", tmp_path / "reduced")
    assert reduced.exit_code == 0, reduced.output
    assert tokens(tmp_path, tmp_path / "reduced", "--family", file)
    (tmp_path / "text").write_text("In the beginning")
    static = ("--scheme", "w8a8", "--static", "*.self_attn.[qkv]_proj", "--calibrate", tmp_path / "text", "--out", tmp_path / "static")
    message = tiny.refused(tmp_path, "quantize", checkpoint, "--family", file, *static)
    assert "q_proj.weight: the format is w8a8, and it has a bias" in message
    figures = ("--only", "decode", "--repetitions", 1, "--json")
    build(tmp_path, checkpoint, file)
    measured = tiny.cli(tmp_path, "bench", tmp_path / "out", "--family", file, *figures)
    assert measured.exit_code == 0, measured.output
