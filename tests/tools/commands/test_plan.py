"""tools/commands/plan.py: the contract of the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import quantised

from npucompile.models.registry import find
from npucompile.tools.advisor.plan.predict import predict
from npucompile.tools.advisor.plan.published import case_of
from npucompile.tools.advisor.plan.system import Workload
from npucompile.tools.advisor.plan.traffic import of_trace
from npucompile.tools.cli import main
from npucompile.tools.commands.plan import NPU_TARGETS


def run(*words: str):
    return CliRunner().invoke(main, ["plan", *words])


def test_a_published_row_as_json() -> None:
    name = "dsr1-a3x16-pd-2k-2k-50ms"
    result = run("--deployment", name, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["predicted"] == predict(case_of(name)).as_dict()
    assert data["commands"] == json.loads(CliRunner().invoke(main, ["deployments", name, "--json"]).stdout)["commands"]
    assert [words.split()[3:5] for words in data["commands"]["serve"]] == [["--role", "prefill"], ["--role", "decode"]]


def test_a_search_with_a_build_a_page_and_buckets(tmp_path: Path) -> None:
    page, buckets = tmp_path / "plan.html", tmp_path / "buckets.json"
    words = ("qwen3-32b", "--cards", "2", "--input", "1000:1,3000:1", "--output", "400", "--concurrency", "24", "--requests", "48")
    result = run(*words, "--tpot", "50", "--html", str(page), "--buckets-out", str(buckets), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["meets"]
    assert data["build"][0].startswith("npucompile build qwen3-32b --target ascend-a3")
    assert 1 <= len(data["best"]) <= 10
    assert page.stat().st_size > 1_000_000
    assert json.loads(buckets.read_text())["buckets"][-1] == max(json.loads(buckets.read_text())["buckets"])
    text = run(*words, "--tpot", "50")
    assert "meets the target" in text.output
    assert "published  qwen3-32b-a3x2" in text.output


def test_a_quantised_checkpoint_is_planned_in_the_formats_that_it_has(tmp_path: Path) -> None:
    quantised.quantised(find("qwen3.5-tiny"), tmp_path / "w8a8", "w8a8")
    words = (str(tmp_path / "w8a8"), "--cards", "1", "--input", "100", "--output", "50", "--concurrency", "4", "--speculative-tokens", "0")
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["build"][0].startswith("npucompile build")
    assert "--quantization" not in data["build"][0]
    assert all(" w8a8, " in each["layout"] for each in data["best"])
    assert "is quantised already, as w8a8; legal is to leave the option out" in run(*words, "--quantization", "bf16").output


def test_a_target_that_nothing_meets_fails_with_what_is_closest():
    result = run("qwen3-32b", "--cards", "1", "--input", "1000", "--output", "100", "--concurrency", "8", "--tpot", "2")
    assert result.exit_code == 1
    assert "closest is" in result.output
    assert "One request alone takes" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "one of a MODEL with its traffic, --deployment ID and --artifact DIR"),
        (("qwen3-32b", "--deployment", "x"), "one of a MODEL"),
        (("qwen3-32b",), "--cards is missing"),
        (("qwen3-32b", "--cards", "1", "--input", "5"), "--input, --output and --concurrency together"),
        (("--deployment", "nothing"), "is not known"),
        (("--deployment", "dsv32-reference-values", "--html", "/no/where.html"), "is no directory"),
        (("--deployment", "dsv32-reference-values", "--buckets-out", "/no/where.json"), "is no directory"),
        (("deepseek-r1", "--cards", "1", "--input", "5", "--output", "5", "--concurrency", "1"), "no layout of"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


ROW = "qwen3-32b-a3x2-mix-2k-2k-50ms"


def test_other_traffic_on_a_published_row_is_what_is_predicted(tmp_path: Path) -> None:
    case = case_of(ROW)
    own = case.workload
    for words, work in (
        (("--concurrency", "8"), Workload.uniform(own.inputs[0], own.outputs[0], 8, 32)),
        (("--input", "1000", "--output", "500"), Workload.uniform(1000, 500, own.concurrency, own.requests)),
        (("--requests", "40", "--rate", "2"), Workload.uniform(own.inputs[0], own.outputs[0], own.concurrency, 40, 2.0)),
        (("--shared-prefix", "512"), replace(own, cached=512)),
    ):
        data = json.loads(run("--deployment", ROW, *words, "--json").stdout)
        assert data["predicted"] == predict(replace(case, workload=work)).as_dict(), words
        assert data["measured"] is None
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 50 * i, "input_length": 300, "output_length": 20}) + "\n" for i in range(30)))
    traced = json.loads(run("--deployment", ROW, "--trace", str(trace), "--json").stdout)
    assert traced["predicted"] == predict(replace(case, workload=of_trace(trace, None))).as_dict()
    late = run("--deployment", ROW, "--tpot", "1")
    assert (late.exit_code, "does not meet the target: TPOT" in late.output) == (1, True)
    long = run("--deployment", "dsr1-a3x32-pd-6k-1.6k-20ms", "--input", "8000")
    assert "whose launch takes" in long.output


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        *(("--deployment", (option, value)) for option, value in (("--cards", "4"), ("--target", "ascend-a3"), ("--itl-target", "5"))),
        *(("--deployment", words) for words in (("--quantization", "w8a8"), ("--speculative-tokens", "1"))),
        *(("--artifact", (option, value)) for option, value in (("--cards", "4"), ("--max-buckets", "4"), ("--metrics", "x"))),
        *(("--trace", (option, value)) for option, value in (("--requests", "9"), ("--rate", "1"), ("--shared-prefix", "5"))),
    ],
)
def test_an_option_that_a_subject_leaves_without_a_meaning_is_refused_by_name(tmp_path: Path, subject: str, words: tuple[str, str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 300, "output_length": 20}')
    subjects = {
        "--deployment": ("--deployment", ROW),
        "--artifact": ("--artifact", str(tmp_path), "--input", "5", "--output", "5", "--concurrency", "1"),
        "--trace": ("qwen3-32b", "--cards", "2", "--trace", str(trace)),
    }
    result = run(*subjects[subject], *words)
    assert result.exit_code == 1
    assert f"{words[0]} with {subject}, which" in result.output


def test_an_artifact_in_place_of_a_model_is_told_its_option(tmp_path: Path) -> None:
    (tmp_path / "manifest.msgpack").touch()
    result = run(str(tmp_path), "--cards", "1", "--input", "5", "--output", "5", "--concurrency", "1")
    assert result.exit_code == 1
    assert f"legal is --artifact {tmp_path}" in " ".join(result.output.split())


def test_every_target_that_can_be_chosen_is_predicted():
    words = ("qwen3-32b", "--cards", "4", "--input", "100", "--output", "10", "--concurrency", "1", "--speculative-tokens", "0")
    for name in NPU_TARGETS:
        assert run(*words, "--target", name).exit_code == 0
    assert "is not one of 'ascend-a3', 'ascend-a2'" in run(*words, "--target", "cuda").output


def test_buckets_from_the_metrics_of_a_server(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    metrics.write_text(
        'npucompile:decode_batch_steps_total{batch_size="2"} 60.0\nnpucompile:decode_batch_steps_total{batch_size="40"} 10.0\n'
    )
    words = ("--deployment", "qwen3-32b-a3x2-mix-2k-2k-50ms", "--metrics", str(metrics), "--max-buckets", "8", "--json")
    chosen = json.loads(run(*words).stdout)["buckets"]["chosen"]
    assert chosen == [2, 40]
    assert "no such file" in run(*words[:3], str(tmp_path / "none")).output
