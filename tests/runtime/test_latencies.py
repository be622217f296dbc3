"""runtime/latencies.py: what is observed of requests whose times are written by hand."""

from __future__ import annotations

from npucompile.runtime.latencies import Latencies
from npucompile.runtime.request import ExecutionRecord, FinishEvent, Request

COUNTS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens", "iteration_tokens_total",
}  # fmt: skip


def seen(latencies: Latencies) -> dict[str, tuple[int, float]]:
    """Number and sum of the observations by name, of those that have any."""
    return {name: (h.counts[-1], round(h.total, 9)) for name, h in latencies.snapshot().items() if h.counts[-1]}


def end(reason: str = "length", completion: int = 4, first_ms: float | None = 300.0) -> FinishEvent:
    return FinishEvent("a", reason, 10, completion, ExecutionRecord(queue_ms=100.0, first_token_ms=first_ms, total_ms=900.0))


def test_all_of_vllms_names_are_there() -> None:
    assert set(Latencies(128).snapshot()) == COUNTS


def test_a_request_from_its_first_token_to_its_end() -> None:
    latencies = Latencies(128)
    latencies.first_token(Request("a", (1,) * 10, 4), 1000.0, 1300.0)
    latencies.step(11)
    latencies.more_tokens(["a"], 1500.0)
    latencies.more_tokens(["a"], 1900.0)
    latencies.finished(end())
    assert seen(latencies) == {
        "time_to_first_token_seconds": (1, 0.3),
        "inter_token_latency_seconds": (2, 0.6),
        "request_time_per_output_token_seconds": (1, 0.2),
        "e2e_request_latency_seconds": (1, 0.9),
        "request_queue_time_seconds": (1, 0.1),
        "request_inference_time_seconds": (1, 0.8),
        "request_prefill_time_seconds": (1, 0.2),
        "request_decode_time_seconds": (1, 0.6),
        "request_prompt_tokens": (1, 10.0),
        "request_generation_tokens": (1, 4.0),
        "request_params_max_tokens": (1, 4.0),
        "iteration_tokens_total": (1, 11.0),
    }


def test_equal_gaps_are_counted_each() -> None:
    latencies = Latencies(128)
    for name, when in (("a", 0.0), ("b", 0.0), ("c", 5.0)):
        latencies.first_token(Request(name, (1,), 4), 0.0, when)
    latencies.more_tokens(["a", "b", "c"], 30.0)
    assert seen(latencies)["inter_token_latency_seconds"] == (3, 0.085)
    assert latencies.snapshot()["inter_token_latency_seconds"].counts[:2] == (0, 1)


def test_what_did_not_succeed_is_not_a_latency_and_nothing_is_kept() -> None:
    latencies = Latencies(128)
    latencies.first_token(Request("a", (1,), 4), 0.0, 1.0)
    before = seen(latencies)
    latencies.finished(end("error"))
    latencies.finished(end("cancelled", completion=0, first_ms=None))
    assert seen(latencies) == before
    assert not latencies._latest_ms
    # A stop string ends a request by cancelling it.
    latencies.finished(end("cancelled", completion=1))
    assert seen(latencies)["e2e_request_latency_seconds"] == (1, 0.9)
    assert "request_time_per_output_token_seconds" not in seen(latencies)
