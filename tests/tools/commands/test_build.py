"""tools/commands/build.py: options reach the plan, examples of the help can be planned, and a build up to date does nothing."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from support import tiny

from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.builder import build_all, deployments
from npucompile.tools.builder.driver import BuildReport
from npucompile.tools.commands import build

SMALL = ("--prefill", "4", "--max-model-len", "16", "--dtype", "float32", "--backend", "eager")


def test_a_checkpoint_becomes_an_artifact_of_its_name(tmp_path, tiny_checkpoint):
    result = tiny.cli(tmp_path, "build", tiny_checkpoint, "--buckets", "1,2,3", *SMALL)
    out = tmp_path / "artifacts" / "tiny"
    assert result.exit_code == 0
    assert result.stdout == f"{out}\n"
    artifact = Artifact.open(out)
    decode = [Bucket("decode", batch, 4) for batch in (1, 2, 3)]
    assert [entry.bucket for entry in artifact.manifest.graphs] == [Bucket("prefill", 1, 4), *decode]
    message = result.stderr
    assert "tiny: 4 buckets for eager (prefill-b1-q4, decode-b1-q4, decode-b2-q4, decode-b3-q4)" in message
    assert "MB of weights" in message
    assert "context 16, 3 requests in flight" in message
    assert "each step drafts 3 tokens and verifies them in the next (--speculative-tokens to change)" in message
    assert "built in" in message
    assert "0 compiled, 0 up to date" in message


def test_a_file_says_what_is_not_typed(tmp_path, tiny_checkpoint):
    (tmp_path / "build.toml").write_text('buckets = "3"\nstructured-outputs = 1\nmax-num-seqs = 2\n')
    tiny.cli(tmp_path, "build", tiny_checkpoint, "--config", tmp_path / "build.toml", "--buckets", "1,2", *SMALL)
    manifest = Artifact.open(tmp_path / "artifacts" / "tiny").manifest
    assert [entry.bucket.batch for entry in manifest.graphs] == [1, 1, 2]
    assert (manifest.limits.bitmasks, manifest.limits.num_request_slots) == (1, 3)


def test_out_says_where(tmp_path, tiny_checkpoint):
    result = tiny.cli(tmp_path / "home", "build", tiny_checkpoint, "--buckets", "1", *SMALL, "--out", tmp_path / "there")
    assert result.stdout == f"{tmp_path / 'there'}\n"
    Artifact.open(tmp_path / "there")
    assert not (tmp_path / "home" / "artifacts").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--buckets", "4,2"), "--buckets: buckets '4,2': 2 does not increase on 4."),
        (("--weights", "bound"), "--weights bound for cpu"),
    ],
)
def test_what_is_not_legal_is_said_with_the_rule(tmp_path, tiny_checkpoint, arguments, error):
    assert error in tiny.refused(tmp_path, "build", tiny_checkpoint, *arguments, "--backend", "eager")
    assert not (tmp_path / "artifacts").exists()


def test_the_notation_of_buckets_is_explained_where_it_is_refused_and_in_help(tmp_path, tiny_checkpoint):
    refusal = tiny.refused(tmp_path, "build", tiny_checkpoint, "--buckets", "2,...,9")
    help_text = tiny.cli(tmp_path, "build", "--help").stdout
    for text in (refusal, help_text):
        assert "unless the last three are in constant ratio" in " ".join(text.split())


def test_what_is_no_model_is_named(tmp_path):
    assert "'qwen9' is neither a preset nor a directory" in tiny.refused(tmp_path, "build", "qwen9")


def test_a_place_that_cannot_be_written_is_named(tmp_path, tiny_checkpoint):
    (tmp_path / "file").write_text("")
    message = tiny.refused(tmp_path, "build", tiny_checkpoint, "--buckets", "1", *SMALL, "--out", tmp_path / "file" / "out")
    assert str(tmp_path / "file") in message


# --- for NPUs ---

SPLIT = "qwen35-397b-a3x24-pd-1p1d-3node"


@pytest.fixture
def plans(monkeypatch):
    """Plans that were to be built for NPUs, and where; nothing is built."""
    calls = []

    def build(plan, out, cache, progress, *, jobs, nice, made):
        calls.append((plan, out, jobs))
        return stand_in(plan, out)

    monkeypatch.setattr(build_all, "build", build)
    monkeypatch.setattr(build_all, "answer", lambda plan, priced: plan)
    return calls


def stand_in(plan, out, *_, **__):
    """A build that leaves next to nothing."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.msgpack").write_bytes(b"stands for one")
    return BuildReport(out, 1.0, 1.0, {bucket.name: 0.5 for bucket in plan.buckets}, ())


def examples(text):
    """Command lines of `npucompile build` in a help text."""
    return re.findall(r"npucompile build ([^`\n]+)", text)


def test_every_example_of_the_help_is_understood_and_planned(tmp_path, plans):
    lines = examples(build.command.help)
    assert len(lines) == 3
    printed = " ".join(tiny.cli(tmp_path, "build", "--help").stdout.split())
    assert all(" ".join(line.split()) in printed for line in lines)
    for number, line in enumerate(lines):
        result = tiny.cli(tmp_path / str(number), "build", *shlex.split(line))
        assert result.exit_code == 0, result.output
    plans = [build for build in plans if not build[0].target.local]
    assert [(str(plan.mesh), plan.quantization, plan.deployment != "") for plan, _, _ in plans] == [
        ("dp=8,tp=2", "w4a8", True), ("dp=4,tp=4", "w8a8", False),
    ]  # fmt: skip
    assert [bucket.batch for bucket in plans[0][0].buckets if bucket.kind == "decode"] == list(range(2, 65, 2))


def test_a_deployment_is_said_and_goes_where_its_model_does(tmp_path, plans):
    result = tiny.cli(tmp_path, "build", "qwen3.5-397b", "--jobs", "3")
    assert result.stdout == f"{tmp_path / 'artifacts' / 'qwen3.5-397b'}\n"
    ((plan, out, jobs),) = plans
    assert (out, jobs) == (tmp_path / "artifacts" / "qwen3.5-397b", 3)
    assert (plan.deployment, plan.phase) == (deployments.DEFAULT["qwen3.5-397b"], "mixed")
    for part in (
        "qwen3.5-397b: 18 buckets for ge (prefill-b1-q3584, decode of 2,4,6,8,12,...,48,50,52,54 requests, 4 tokens each)",
        "target ascend-a3, mesh dp=8,tp=2 (16 ranks), quantization w4a8, 3 drafts",
        "a device; context 5120, 54 requests in flight in each of 8 groups",
        "deployment qwen35-397b-a3x8-in3k5-out1k5-50ms, mixed",
        "built in 1.0 s: 18 compiled, 0 up to date",
    ):
        assert part in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--phase", "decode"), "has no phase 'decode'; legal are mixed"),
        (("--target", "ascend-a3", "--mesh", "dp=8;tp=2"), "mesh 'dp=8;tp=2': 'dp=8;tp=2' is not NAME=SIZE with SIZE at least 1"),
        (("--mesh", "dp=8,tp=2"), "a build for NPUs (--target ascend-a3 --mesh tp=2, or a --deployment)"),
    ],
)
def test_what_npus_cannot_have_is_said_before_anything_is_built(tmp_path, plans, arguments, message):
    assert message in tiny.refused(tmp_path, "build", "qwen3.5-397b", *arguments)
    assert plans == []
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "ascend-a4"), "'ascend-a4' is not one of 'cpu', 'ascend-a3', 'ascend-a2'"),
        (("--deploy", SPLIT), "there is no option --deploy; did you mean --deployment?"),
    ],
)
def test_a_choice_that_is_none_is_a_usage_error_with_the_choices(tmp_path, arguments, message):
    result = tiny.cli(tmp_path, "build", "qwen3.5-397b", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert f"Invalid value for '{arguments[0]}'" in result.stderr or "no option" in message


def test_a_build_with_nothing_to_do_plans_nothing(tmp_path, plans, monkeypatch):
    arguments = ("build", "qwen3.5-397b", "--buckets", "2")
    first = tiny.cli(tmp_path, *arguments)
    assert len(plans) == 1
    loaded = []
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: loaded.append(name) or real(name, *rest))
    again = tiny.cli(tmp_path, *arguments)
    assert again.stdout == first.stdout
    assert "is up to date: the same options, sources, checkpoint and toolchain" in again.stderr
    assert "..builder.build_all" not in loaded
    assert len(plans) == 1
    Path(first.stdout.strip(), "manifest.msgpack").write_bytes(b"another")
    assert "2 compiled, 0 up to date" in tiny.cli(tmp_path, *arguments).stderr
    assert "..builder.build_all" in loaded
    assert len(plans) == 2


def test_the_old_name_of_an_option_is_still_understood():
    parsed = [build.command.make_context("build", ["model", option, "7"]).params["nice"] for option in ("--nice", "--patience")]
    assert parsed == [7, 7]


@pytest.mark.parametrize(("phase", "machines"), [((), 4), (("--phase", "decode"), 2)])
def test_both_phases_of_a_deployment_are_one_command_that_says_what_serves_them(tmp_path, plans, phase, machines):
    words = ["build", "deepseek-r1", "--deployment", "dsr1-a3x32-pd-3.5k-1k-20ms", "--precompile", "none", *phase]
    result = tiny.cli(tmp_path, *words)
    assert result.exit_code == 0, result.output
    assert [plan.phase for plan, *_ in plans] == (["decode"] if phase else ["prefill", "decode"])
    served = [shlex.split(line) for line in result.stderr.splitlines() if line.startswith("  npucompile serve ")]
    assert len(served) == machines
    decode = str(tmp_path / "artifacts" / "deepseek-r1-decode")
    assert [words[2:5] == [decode, "--role", "decode"] for words in served] == [False] * (machines - 2) + [True] * 2
