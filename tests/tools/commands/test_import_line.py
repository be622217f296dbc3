"""tools/commands/import_line.py: JSON, and where the text comes from."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner
from support.launch_lines import LINE

from npucompile.graphs.errors import SpecError
from npucompile.tools.commands import build
from npucompile.tools.commands.import_line import command


def said(*words: str, text: str | None = None) -> str:
    result = CliRunner().invoke(command, words, input=text, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_json_has_the_flags_and_the_commands():
    data = json.loads(said("--json", LINE))
    assert {"flags", "command", "notes", "roles"} == set(data)
    assert all({"name", "status", "why"} <= set(flag) for flag in data["flags"])
    assert len(data["flags"]) == 6
    built, served = data["command"].splitlines()
    assert shlex.split(built)[:3] == ["npucompile", "build", "qwen3-32b"]
    build.command.make_context("build", shlex.split(built)[2:])
    assert served.startswith("npucompile serve ")
    (role,) = data["roles"]
    assert (role["name"], role["planned"], role["problem"], role["deployment"]) == ("mixed", True, "", None)


def test_a_line_comes_in_words_from_a_file_or_from_the_input(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f"#!/bin/bash\n{LINE}\n")
    wanted = json.loads(said("--json", LINE))
    assert [flag["given"] for flag in json.loads(said("--json", str(file)))["flags"]] == [flag["given"] for flag in wanted["flags"]]
    assert json.loads(said("--json", "-", text=LINE)) == wanted
    assert json.loads(said("--json", "--", *LINE.split())) == wanted


def test_options_say_what_the_line_does_not():
    text = "python -m sglang.launch_server --model-path $MODEL_PATH --tp-size $TP --max-running-requests 8 --context-length 4096"
    data = json.loads(said("--json", text, "--model", "qwen3-8b", "--set", "TP=2", "--target", "ascend-a2", "--out", "there"))
    assert data["command"].splitlines()[0] == (
        "npucompile build qwen3-8b --target ascend-a2 --mesh dp=1,tp=2 --buckets 1,2,4,8 --prefill 4096 --max-model-len 4096 "
        "--max-num-seqs 8 --speculative-tokens 0 --out there"
    )
    assert data["command"].splitlines()[1].startswith("npucompile serve there ")


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="cannot be read as a script"):
        said(str(tmp_path / "binary"))
    with pytest.raises(SpecError, match="--set A: legal is NAME=VALUE"):
        said(LINE, "--set", "A")
    with pytest.raises(SpecError, match=r"nowhere.sh: no such file; legal is a launch line in quotes"):
        said("nowhere.sh")


@pytest.mark.parametrize("line", ["sglang serve deepseek-ai/DeepSeek-V3.2-W8A8", "vllm serve Qwen/Qwen3.5-397B-A17B -tp 2"])
def test_a_build_that_no_rank_can_hold_is_not_said_to_be_planned(line):
    text = said(line)
    assert "  planned: " not in text
    assert "  not planned: a rank of ascend-a3 with mesh dp=1,tp=" in text
    assert "No number of requests and no context fits: legal are a mesh of more ranks" in text
    (role,) = json.loads(said("--json", line))["roles"]
    assert (role["planned"], "too much" in role["problem"]) == (False, True)
