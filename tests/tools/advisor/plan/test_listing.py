"""tools/advisor/plan/listing.py: the table, one deployment in detail, and JSON, as the command prints them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import SpecError
from npucompile.models import registry
from npucompile.tools.builder.deployments import DEFAULT, deployments
from npucompile.tools.commands.deployments import command
from npucompile.tools.notation import parse_buckets

PUBLISHED = DEFAULT["qwen3.5-397b"]


def said(*words: str) -> str:
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_lists_every_row_once_and_those_of_other_models_last():
    text = said()
    listed = [line.split()[0].rstrip("*") for line in text.splitlines() if line and line.split()[0].rstrip("*") in deployments()]
    assert sorted(listed) == sorted(deployments())
    built, other = text.split("not built:")
    assert "qwen35-397b-a3x24-pd-1p1d-3node" in built
    assert "qwen35-27b-a2x8-mix-ht-128k" in built
    rows = json.loads(said("--json"))
    assert {row["id"] for row in rows if row["buildable"]} == {name for name in deployments() if name in built}
    assert {row["id"] for row in rows if row["why"]} == {name for name in deployments() if name not in built}
    assert "dsv32-reference-values" in other


def test_a_line_shows_what_decides_a_build():
    line = next(line for line in said().splitlines() if line.startswith(PUBLISHED))
    name, model, place, mesh, quantization, traffic, drafts, buckets = line.split()
    assert (name, model, place, mesh) == (PUBLISHED + "*", "qwen3.5-397b", "ascend-a3", "dp=8,tp=2")
    assert (quantization, traffic, drafts) == ("w4a8", "3500/1500", "3")
    assert parse_buckets(buckets) == deployments()[PUBLISHED].phase().buckets
    assert "..." in buckets
    split = next(line for line in said().splitlines() if line.startswith("qwen35-397b-a3x24"))
    assert "P:dp=8,tp=2 D:dp=16,tp=2" in split


def test_teaches_how_to_build():
    assert f"npucompile build qwen3.5-397b --deployment {PUBLISHED}" in said()
    name = "qwen35-397b-a3x8-in16k-out1k-50ms"
    assert said(name).splitlines()[-3:] == [
        f"build it: npucompile build qwen3.5-397b --deployment {name} --encode 256,1024,4096",
        "serve it, a line on its machine:",
        "  npucompile serve qwen3.5-397b",
    ]
    last = said("dsv32-reference-values").splitlines()[-1]
    assert last == "not built: no launch command is published: parameter values for comparison, not a launch line"


def test_one_row_in_full():
    text = said(PUBLISHED)
    for fact in (
        "w4a8, drafts bf16, recurrent state bfloat16",
        "3500 tokens in, 1500 out, requests in flight 432",
        "at most 50 ms",
        "1 instance of 1 node, mesh dp=8,tp=2, experts over 16 ranks",
        "432 in all, 54 a dp group",
        "3 drafts",
        "5120 tokens",
        "2188 of 128 tokens, published tokens 280000",
        "216, 4 a request",
        "chunks of 3584 tokens",
    ):
        assert fact in text, fact
    assert "cached share 0.9" in said("qwen35-397b-a3x8-in64k-out1k-prefix90-50ms")
    assert "accept_length 2.82" in said("dsr1-a3x8-mix-2k-2k-50ms")


def test_phases_of_a_split_deployment_are_told_apart():
    text = said("qwen35-397b-a3x24-pd-1p1d-3node")
    prefill, decode = text[text.index("\nprefill:") : text.index("\ndecode:")], text[text.index("\ndecode:") :]
    assert "no decoding" in prefill
    assert "chunks of 4096" in prefill
    assert "chunks of" not in decode
    assert "1 instance of 2 nodes, mesh dp=16,tp=2, experts over 32 ranks" in decode


@pytest.mark.parametrize("name", list(deployments()))
def test_every_row_can_be_shown(name):
    assert said(name).startswith(f"{name}: ")


def test_json_holds_everything():
    rows = json.loads(said("--json"))
    assert [row["id"] for row in rows] == list(deployments())
    details = json.loads(said(PUBLISHED, "--json"))
    assert details == next(row for row in rows if row["id"] == PUBLISHED)
    assert (details["buildable"], details["prefill_chunk"], details["prefill_prompts"], details["npus"]) == (True, 3584, 1, 16)
    phase = details["phases"]["mixed"]
    assert (phase["mesh"], phase["buckets"][-1], phase["group_requests"], phase["limits"]["num_slots"]) == ("dp=8,tp=2", 54, 54, 217)
    assert [row["id"] for row in rows if row["buildable"]] == [
        row.id for row in deployments().values() if row.phases and row.model in registry.presets()
    ]
    split = json.loads(said("qwen3-235b-a3x24-pd-3.5k-1.5k-50ms", "--json"))["phases"]
    assert [len(split[name]["deviations"]) for name in ("prefill", "decode")] == [0, 0]


def test_a_model_narrows_the_list():
    assert len(json.loads(said("--model", "qwen3.5-397b", "--json"))) == 13
    assert "qwen35-27b" not in said("--model", "qwen3.5-397b")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--model", "qwen35-397b"), r"no deployment is of model 'qwen35-397b' \(did you mean qwen3.5-397b\?\); legal are qwen3.5-397b, "),
        (("--model", "deepseek-r1", PUBLISHED), "no deployment is of model 'deepseek-r1'"),
        (("nothing-of-the-kind",), "'nothing-of-the-kind' is not known"),
    ],
)
def test_what_is_not_there_is_refused(words, reason):
    with pytest.raises(SpecError, match=reason):
        CliRunner().invoke(command, words, catch_exceptions=False)
