"""Histograms of latencies and lengths, with vLLM's names, meanings and buckets.

A request's gap between two tokens (`inter_token_latency_seconds`) is observed once per step that brought it any, as vLLM does, with drafts
too. What is known only at its end is observed then, of requests that produced a token and did not fail; one that was cancelled counts,
because a stop string ends a request that way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .histogram import Histogram, HistogramSnapshot, one_two_five
from .request import FinishEvent, Request

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Latencies:
    """The histograms of one engine, which guards them with its lock.

    Args:
        max_model_len: longest request in tokens.
    """

    def __init__(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        self._first_token = Histogram(FIRST_TOKEN_S)
        self._between_tokens = Histogram(TOKEN_S)
        self._per_token = Histogram(TOKEN_S)
        self._end_to_end, self._queue, self._inference = Histogram(REQUEST_S), Histogram(REQUEST_S), Histogram(REQUEST_S)
        self._prefill, self._decode = Histogram(REQUEST_S), Histogram(REQUEST_S)
        self._prompt_tokens, self._generation_tokens, self._max_tokens = Histogram(lengths), Histogram(lengths), Histogram(lengths)
        self._step_tokens = Histogram(STEP_TOKENS)
        # When each live request that has a token got its latest, in ms.
        self._latest_ms: dict[str, float] = {}

    def first_token(self, request: Request, submitted_ms: float, now_ms: float) -> None:
        """Observes the first token of a request."""
        self._first_token.observe((now_ms - submitted_ms) / 1e3)
        self._max_tokens.observe(request.max_tokens)
        self._latest_ms[request.id] = now_ms

    def more_tokens(self, request_ids: Iterable[str], now_ms: float) -> None:
        """Observes that a step brought further tokens of these requests, which all have one; of those that ended meanwhile, nothing.

        Most requests of a step were in the step before it, so their gaps are one value, observed once.
        """
        latest = self._latest_ms
        # A step that hung may bring tokens of requests that were given up.
        live = [request_id for request_id in request_ids if request_id in latest]
        for latest_ms, times in Counter(map(latest.__getitem__, live)).items():
            self._between_tokens.observe((now_ms - latest_ms) / 1e3, times)
        latest.update(dict.fromkeys(live, now_ms))

    def step(self, tokens: int) -> None:
        """Observes the tokens of a step, prefilled and sampled ones."""
        self._step_tokens.observe(tokens)

    def finished(self, end: FinishEvent) -> None:
        """Observes the end of a request, whatever its reason."""
        self._latest_ms.pop(end.request_id, None)
        record = end.record
        if end.reason == "error" or record.first_token_ms is None:
            return
        self._end_to_end.observe(record.total_ms / 1e3)
        self._queue.observe(record.queue_ms / 1e3)
        self._inference.observe((record.total_ms - record.queue_ms) / 1e3)
        self._prefill.observe((record.first_token_ms - record.queue_ms) / 1e3)
        decode_s = (record.total_ms - record.first_token_ms) / 1e3
        self._decode.observe(decode_s)
        if end.completion_tokens > 1:
            self._per_token.observe(decode_s / (end.completion_tokens - 1))
        self._prompt_tokens.observe(end.prompt_tokens)
        self._generation_tokens.observe(end.completion_tokens)

    def snapshot(self) -> dict[str, HistogramSnapshot]:
        """Copies of all histograms, by vLLM's names."""
        histograms = {
            "time_to_first_token_seconds": self._first_token,
            "inter_token_latency_seconds": self._between_tokens,
            "request_time_per_output_token_seconds": self._per_token,
            "e2e_request_latency_seconds": self._end_to_end,
            "request_queue_time_seconds": self._queue,
            "request_inference_time_seconds": self._inference,
            "request_prefill_time_seconds": self._prefill,
            "request_decode_time_seconds": self._decode,
            "request_prompt_tokens": self._prompt_tokens,
            "request_generation_tokens": self._generation_tokens,
            "request_params_max_tokens": self._max_tokens,
            "iteration_tokens_total": self._step_tokens,
        }
        return {name: histogram.snapshot() for name, histogram in histograms.items()}
