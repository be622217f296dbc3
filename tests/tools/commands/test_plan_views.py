"""tools/commands/plan_views.py: what the views take from a server's own metrics, and from a trace."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from npucompile.runtime.metrics import Metrics
from npucompile.server.exposition import render_metrics
from npucompile.server.service import ServedModel
from npucompile.tools.cli import main
from npucompile.tools.plan.buckets import of_metrics


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
    both = CliRunner().invoke(main, ["plan", "qwen3-32b", "--cards", "2", "--trace", str(trace), "--input", "5"])
    assert "one of both ways" in both.output
