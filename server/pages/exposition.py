"""The text of `/metrics`: the engine's numbers in Prometheus's format.

Two families. `vllm:` has vLLM's names, labels and meanings, so that dashboards and autoscalers made for vLLM work as they are.
`npucompile:` has all counters and gauges of our own; where a name is vLLM's, so is the meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from ...runtime.histogram import HistogramSnapshot
from ...runtime.metrics import EXPERTS
from ..engine.service import ServedModel

__all__ = ["CONTENT_TYPE", "render_metrics"]

OURS, VLLM = "npucompile:", "vllm:"

HELP: Mapping[str, str] = {
    "num_requests_running": "Requests with pages and state slots.",
    "num_requests_waiting": "Requests that wait for pages or slots.",
    "dp_requests_running": "Requests with pages and state slots per dp group.",
    "dp_requests_waiting": "Requests that wait for pages or slots per dp group.",
    "dp_prompt_tokens": "Tokens of the prompts of both per dp group.",
    "kv_cache_usage_perc": "Share of KV pages in use, 1 is all.",
    "prompt_tokens_total": "Prompt tokens prefilled.",
    "generation_tokens_total": "Tokens generated.",
    "preemptions_total": "Times a request lost its pages and was prefilled again.",
    "prefix_cache_queries_total": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_cache_hits_total": "Tokens of prompts that were found there, and not computed.",
    "padded_rows_total": "Rows of padding computed.",
    "discarded_rows_total": "Rows computed for requests that had ended by then.",
    "compiles_after_ready_total": "Traces or compiles in the serving process after ready; anything but 0 is a bug.",
    "requests_total": "Requests finished.",
    "requests_finished_total": "Requests finished per reason.",
    "steps_total": "Steps run.",
    "degraded_steps_total": "Steps of a bucket that cannot run, which ran in another one.",
    "steps_failed_total": "Steps that failed, with their requests.",
    "spec_decode_num_drafts_total": "Times that drafts of a request were verified.",
    "spec_decode_num_draft_tokens_total": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens_total": "Draft tokens accepted.",
    "spec_decode_num_accepted_tokens_per_pos_total": "Draft tokens accepted per place among the drafts of a step, from 0.",
    "bucket_steps_total": "Steps run per bucket.",
    "decode_batch_steps_total": "Decode steps run per live rows, of the dp group that has most.",
    "bucket_info": "What runs each bucket; always 1.",
    "kv_transfer_rooms": "Prompts of handovers that are computed, kept, or on their way.",
    "kv_transfer_connections": "Servers of the other role that are connected.",
    "kv_transfer_withheld": "Handovers whose pages nobody may use, since the prefill server does not say whether it still writes.",
    "kv_transfer_requests_total": "Requests whose prompts were handed over.",
    "kv_transfer_seconds_total": "From asking for a prompt to having it, added up.",
    "kv_transfer_bytes_total": "Bytes written to decode servers.",
    "kv_transfer_local_total": "Requests of a decode server whose prompts it computed itself.",
    "kv_transfer_failures_total": "Handovers that failed per cause; a request is then handed over by another server.",
    "expert_imbalance": "Tokens of the expert that was chosen most over the mean of all, per layer; /expert_counts has each.",
    "encoded_pictures_total": "Pictures, and frame pairs of videos, that were encoded.",
    "encode_seconds_total": "From the launches of encode steps to their results, added up.",
    "picture_row_queries_total": "Rows of pictures that admitted requests needed.",
    "picture_row_hits_total": "Rows that were there, or on their way.",
    "picture_evictions_total": "Pictures whose rows went to others.",
    "picture_rows_pinned": "Rows of pictures that requests need.",
    "picture_rows_cached": "Rows of pictures that are kept for later requests.",
    "picture_decodes_total": "Pictures and videos per result: decoded, refused, or killed, where the process did not survive them.",
    "picture_decode_seconds_total": "Of processes that decode, added up.",
    "picture_decode_hits_total": "Pictures and videos that were decoded for another request before.",
    "picture_decode_cached_bytes": "Of pictures that are kept decoded.",
    "request_parts_left_out_total": "Tools and items that no prompt can have, left out of requests and named in their answers.",
    "websocket_connections": "Sockets open.",
    "draining": "1 from the moment that the server was told to end.",
    "requests_not_finite_total": "Requests that failed because the model returned what is no number.",
    "artifact_info": "The model and artifact being served; always 1.",
    "num_preemptions_total": "Times a request lost its pages and was prefilled again.",
    "request_success_total": "Requests finished per reason; abort is cancelled by its client, or by a stop string.",
    "time_to_first_token_seconds": "From submission to the first token.",
    "inter_token_latency_seconds": "Between two steps that brought tokens of a request.",
    "request_time_per_output_token_seconds": "Mean time of a token after the first, per request.",
    "e2e_request_latency_seconds": "From submission to the end of a request.",
    "request_queue_time_seconds": "From submission to the first step of a request.",
    "request_inference_time_seconds": "From the first step of a request to its end.",
    "request_prefill_time_seconds": "From the first step of a request to its first token.",
    "request_decode_time_seconds": "From the first token of a request to its end.",
    "request_prompt_tokens": "Prompt tokens per request.",
    "request_generation_tokens": "Generated tokens per request.",
    "request_params_max_tokens": "Most tokens to generate, as requested.",
    "iteration_tokens_total": "Tokens prefilled and sampled per step.",
}

LABELS: Mapping[str, tuple[str, str]] = {
    "bucket_steps": ("bucket_steps_total", "bucket"),
    "degraded_steps": ("degraded_steps_total", "bucket"),
    "kv_transfer_failures": ("kv_transfer_failures_total", "cause"),
    "picture_decodes": ("picture_decodes_total", "result"),
    **{name: (name, "dp_rank") for name in ("dp_requests_running", "dp_requests_waiting", "dp_prompt_tokens")},
    "decode_batch_steps": ("decode_batch_steps_total", "batch_size"),
    "spec_decode_num_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos_total", "position"),
}
"""The engine's numbers that are mappings: name and label of the metric that each becomes."""

FINISHED = "requests_finished_"
"""Prefix of the engine's numbers per finish reason, which become one metric with a label."""

VLLM_NAMES: Mapping[str, str] = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage_perc",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
    "preemptions_total": "num_preemptions_total",
    "prefix_cache_queries_total": "prefix_cache_queries_total",
    "prefix_cache_hits_total": "prefix_cache_hits_total",
    "spec_decode_num_drafts_total": "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total": "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total": "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total": "spec_decode_num_accepted_tokens_per_pos_total",
}
"""Our metrics that vLLM has too, and their names there."""

VLLM_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "timeout", "error": "error"}

Samples = list[tuple[dict[str, str], float]]


def render_metrics(stats: Mapping[str, Any], model: ServedModel) -> str:
    """Engine numbers as Prometheus text; names that end in `_total` are counters, `histograms` has histograms, the others are gauges."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families(stats, model)))
    return generate_latest(registry).decode()


def families(stats: Mapping[str, Any], model: ServedModel) -> Iterator[Metric]:
    """All metrics of the engine's numbers."""
    ours = _ours(stats)
    labels = {"model_name": model.name, "engine": "0"}
    for name, samples in ours.items():
        yield _family(OURS, name, samples)
    yield _family(OURS, "artifact_info", [({"model": model.name, "artifact": model.artifact or ""}, 1)])
    if (counts := stats.get(EXPERTS)) is not None:
        ratios = counts.max(axis=1) * model.num_experts / counts.sum(axis=1)
        yield _family(OURS, "expert_imbalance", [({"layer": str(layer)}, float(ratio)) for layer, ratio in enumerate(ratios)])
    for name, theirs in VLLM_NAMES.items():
        if name in ours:
            yield _family(VLLM, theirs, [(labels | own, value) for own, value in ours[name]])
    finished = {reason: stats[FINISHED + reason] for reason in VLLM_REASONS if FINISHED + reason in stats}
    if finished:
        ends: Samples = [(labels | {"finished_reason": VLLM_REASONS[reason]}, count) for reason, count in finished.items()]
        yield _family(VLLM, "request_success_total", ends)
    for name, histogram in stats.get("histograms", {}).items():
        yield _histogram(VLLM + name, HELP.get(name, ""), labels, histogram)


def _ours(stats: Mapping[str, Any]) -> dict[str, Samples]:
    metrics: dict[str, Samples] = {}
    for name, value in stats.items():
        if name in ("histograms", EXPERTS):
            continue
        if name in LABELS:
            metric, label = LABELS[name]
            order = int if label in ("batch_size", "position", "dp_rank") else str
            metrics[metric] = [({label: str(key)}, value[key]) for key in sorted(value, key=order)]
        elif name == "backends":
            metrics["bucket_info"] = [({"bucket": bucket, "backend": backend}, 1) for bucket, backend in sorted(value.items())]
        elif name.startswith(FINISHED):
            metrics.setdefault(f"{FINISHED}total", []).append(({"reason": name.removeprefix(FINISHED)}, value))
        else:
            metrics[name] = [({}, value)]
    return metrics


class _Families(Collector):
    """Metrics that are collected once."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _family(prefix: str, name: str, samples: Samples) -> Metric:
    counter = name.endswith("_total")
    # Samples may differ in their labels' values, not in their names.
    names = list(samples[0][0]) if samples else []
    kind = CounterMetricFamily if counter else GaugeMetricFamily
    family: Metric = kind(prefix + name, HELP.get(name, ""), labels=names)
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
    return family


def _histogram(name: str, text: str, labels: Mapping[str, str], histogram: HistogramSnapshot) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    buckets = [
        ("+Inf" if math.isinf(bound) else str(float(bound)), count) for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
    ]
    family.add_metric(list(labels.values()), buckets, histogram.total)
    return family
