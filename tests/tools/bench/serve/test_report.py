"""tools/bench/serve/report.py: lines that scripts for published benchmarks read, and JSON with their names."""

from __future__ import annotations

import json
import math
import re

from npucompile.tools.bench.serve import report
from npucompile.tools.bench.serve.outcome import Arrival, ServerWord, StreamOutcome
from npucompile.tools.bench.serve.summary import summarise

LOAD = (
    StreamOutcome(0, 0.0, 0.0, 2.0, 10, (Arrival(0.5, 1), Arrival(2.0, 3)), ServerWord(verify_steps=1, accepted_tokens=2)),
    StreamOutcome(1, 0.0, 0.0, 1.0, 10, error="no room"),
)


def test_the_lines_have_the_published_names() -> None:
    text = "\n".join(report.lines(summarise(LOAD, {"ttft": 1e3}), backend="openai", request_rate=4.0, max_concurrency=8))
    found = dict(re.findall(r"^(.+?): +(\S+)$", text, re.MULTILINE))
    assert found["Successful requests"] == "1"
    assert found["Failed requests"] == "1"
    assert found["Maximum request concurrency"] == "8"
    assert found["Request rate configured (RPS)"] == "4.00"
    assert found["Benchmark duration (s)"] == "2.00"
    assert (found["Total input tokens"], found["Total generated tokens"]) == ("10", "4")
    assert found["Request throughput (req/s)"] == found["Request goodput (req/s)"] == "0.50"
    assert found["Output token throughput (tok/s)"] == "2.00"
    assert found["Total Token throughput (tok/s)"] == "7.00"
    assert (found["Concurrency"], found["Accept length"]) == ("1.00", "3.00")
    assert found["Mean TTFT (ms)"] == found["Median TTFT (ms)"] == found["P99 TTFT (ms)"] == "500.00"
    assert (found["P95 TPOT (ms)"], found["Mean ITL (ms)"], found["Mean E2EL (ms)"]) == ("500.00", "500.00", "2000.00")
    assert "Time per Output Token (excl. 1st token)" in text
    assert "1 failed: no room" in text
    # Columns of the published reports: 40 characters of name, then the value.
    assert all(line.index(":") < 40 == len(line) - len(line[40:]) for line in text.splitlines() if re.match(r"[A-Z].*\(ms\):", line))


def test_what_was_not_asked_for_has_no_line() -> None:
    plain = "\n".join(report.lines(summarise(LOAD[1:]), backend="openai", request_rate=math.inf, max_concurrency=None))
    for name in ("Maximum request concurrency", "Request rate configured", "goodput", "Accept length", "cached"):
        assert name not in plain


def test_json_has_the_published_names_and_every_request() -> None:
    data = json.loads(json.dumps(report.as_data(summarise(LOAD), {"request_rate": math.inf, "num_prompts": 2}, LOAD), allow_nan=False))
    assert data["request_rate"] == "inf"
    assert (data["completed"], data["failed"], data["errors"]) == (1, 1, {"no room": 1})
    assert data["median_ttft_ms"] == data["p99_ttft_ms"] == 500.0
    assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p95", "p99") for name in ("ttft", "tpot", "itl", "e2el")} <= set(
        data
    )
    first, second = data["requests"]
    assert first["arrivals"] == [[0.5, 1], [2.0, 3]]
    assert (first["prompt_tokens"], first["output_tokens"], second["error"]) == (10, 4, "no room")
