"""tools/advisor/plan/views.py: what the views take from a server's own metrics, and from a trace."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from npucompile.runtime.metrics import Metrics
from npucompile.server.engine.service import ServedModel
from npucompile.server.pages.exposition import render_metrics
from npucompile.tools.advisor.plan.buckets import of_metrics
from npucompile.tools.cli import main


def test_the_text_that_our_server_writes_is_read():
    metrics = Metrics(drafts=0)
    for rows, times in ((2, 3), (4, 5)):
        for _ in range(times):
            metrics.count_decode_batch(rows)
    text = render_metrics(metrics.snapshot(), ServedModel("m", 64, 100))
    assert of_metrics(text) == {2: 3, 4: 5}


def test_a_trace_is_planned(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 200 * i, "input_length": 500 + 10 * (i % 7), "output_length": 100} for i in range(40)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    result = CliRunner().invoke(main, ["plan", "qwen3-32b", "--cards", "2", "--trace", str(trace), "--tpot", "60", "--json"])
    assert result.exit_code == 0, result.output
    best = json.loads(result.stdout)["best"][0]["predicted"]
    assert best["output_tok_s"] <= 100 * 40 / (0.2 * 39) * 1.2
    assert json.loads(result.stdout)["serve"] == "npucompile serve qwen3-32b"
    both = CliRunner().invoke(main, ["plan", "qwen3-32b", "--cards", "2", "--trace", str(trace), "--input", "5"])
    assert "one of both ways" in both.output


def test_priorities_and_a_target_for_gaps_are_those_of_the_server(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 20 * i, "input_length": 1500, "output_length": 60, "priority": -(i % 3 == 0)} for i in range(60)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = ["plan", "qwen3-32b", "--cards", "1", "--trace", str(trace), "--quantization", "w8a8", "--speculative-tokens", "1"]
    result = CliRunner().invoke(main, [*words, "--itl-target", "200"])
    assert result.exit_code == 0, result.output
    assert "npucompile serve qwen3-32b --itl-target 200 --min-priority -1" in result.output
    data = json.loads(CliRunner().invoke(main, [*words, "--itl-target", "200", "--json"]).stdout)
    assert "gaps of 200 ms" in data["best"][0]["layout"]
    ttft = data["best"][0]["predicted"]["priority_ttft_ms"]
    assert f"priority   -1: TTFT {ttft['-1']['mean']:,.0f} ms" in result.output
    assert 2 * ttft["-1"]["mean"] < ttft["0"]["mean"]


def test_answers_of_one_token_are_planned(tmp_path: Path) -> None:
    """Nothing decodes, so there are no buckets to choose, and what binds is prefill."""
    words = ["plan", "qwen3-32b", "--cards", "2", "--input", "2000", "--output", "1", "--concurrency", "16", "--quantization", "w8a8"]
    result = CliRunner().invoke(main, [*words, "--speculative-tokens", "0", "--html", str(tmp_path / "plan.html")])
    assert result.exit_code == 0, result.output
    assert "no step decodes: every answer is the token that its prompt gives" in result.output
    assert "npucompile build qwen3-32b" in result.output
    data = json.loads(CliRunner().invoke(main, [*words, "--speculative-tokens", "0", "--json"]).stdout)
    assert data["best"][0]["predicted"]["binding"] == "prefill"
    assert data["best"][0]["predicted"]["ttft_ms"] == data["best"][0]["predicted"]["e2e_ms"] > 0
