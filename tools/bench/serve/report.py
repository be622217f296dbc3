"""The report of a load: the lines that published serving benchmarks print, and the names of their JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .outcome import StreamOutcome
from .summary import Latency, Summary

WIDTH = 50
LATENCIES = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)
"""Name in JSON, name in a line, and heading of each latency."""


def lines(summary: Summary, *, backend: str, request_rate: float, max_concurrency: int | None) -> Iterator[str]:
    """The report as text; a line is left out where its figure was not asked for or not told."""
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    figures: list[tuple[str, str | int | float | None]] = [
        ("Backend", backend),
        ("Successful requests", summary.completed),
        ("Failed requests", summary.failed),
        ("Maximum request concurrency", max_concurrency),
        ("Request rate configured (RPS)", None if math.isinf(request_rate) else request_rate),
        ("Benchmark duration (s)", summary.duration_s),
        ("Total input tokens", summary.total_input),
        ("Total cached tokens", summary.cached_tokens),
        ("Total generated tokens", summary.total_output),
        ("Request throughput (req/s)", summary.request_throughput),
        ("Request goodput (req/s)", summary.goodput),
        ("Output token throughput (tok/s)", summary.output_throughput),
        ("Peak output token throughput (tok/s)", summary.peak_output_throughput),
        ("Peak concurrent requests", summary.peak_concurrency),
        ("Total Token throughput (tok/s)", summary.total_throughput),
        ("Concurrency", summary.concurrency),
        ("Accept length", summary.accept_length),
    ]
    yield from (_line(name, value) for name, value in figures if value is not None)
    for key, name, heading in LATENCIES:
        latency: Latency = getattr(summary, key)
        yield f"{heading:-^{WIDTH}}"
        yield _line(f"Mean {name} (ms)", latency.mean)
        yield _line(f"Median {name} (ms)", latency.median)
        yield from (_line(f"P{percent} {name} (ms)", value) for percent, value in latency.percentiles.items())
    yield "=" * WIDTH
    yield from (f"{count} failed: {message}" for message, count in summary.errors.items())


def as_data(summary: Summary, settings: Mapping[str, Any], outcomes: Sequence[StreamOutcome] = ()) -> dict[str, Any]:
    """The report for JSON, with the names of `vllm bench serve`; `requests` has every outcome."""
    data: dict[str, Any] = {
        **{name: "inf" if value == math.inf else value for name, value in settings.items()},
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "errors": dict(summary.errors),
        "total_input_tokens": summary.total_input,
        "total_cached_tokens": summary.cached_tokens,
        "total_output_tokens": summary.total_output,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_throughput,
        "max_output_tokens_per_s": summary.peak_output_throughput,
        "max_concurrent_requests": summary.peak_concurrency,
        "total_token_throughput": summary.total_throughput,
        "concurrency": summary.concurrency,
        "accept_length": summary.accept_length,
    }
    for key, _, _ in LATENCIES:
        latency: Latency = getattr(summary, key)
        data |= {f"mean_{key}_ms": latency.mean, f"median_{key}_ms": latency.median, f"std_{key}_ms": latency.std}
        data |= {f"p{percent}_{key}_ms": value for percent, value in latency.percentiles.items()}
    return data | {"requests": [_outcome(outcome) for outcome in outcomes]}


def _outcome(outcome: StreamOutcome) -> dict[str, Any]:
    counts = {"prompt_tokens": outcome.prompt_tokens, "output_tokens": outcome.output_tokens}
    fields = {name: value for name, value in asdict(outcome).items() if name != "token_ids"}
    return fields | counts | {"arrivals": [list(arrival) for arrival in outcome.arrivals]}


def _line(name: str, value: str | int | float) -> str:
    return f"{name + ':':<40} {value:<10.2f}".rstrip() if isinstance(value, float) else f"{name + ':':<40} {value}"
