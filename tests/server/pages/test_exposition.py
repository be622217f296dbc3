"""server/pages/exposition.py: the engine's numbers, read back by Prometheus's own parser."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from npucompile.runtime.histogram import Histogram
from npucompile.runtime.latencies import Latencies
from npucompile.server.engine.service import ServedModel
from npucompile.server.pages.exposition import HELP, render_metrics

MODEL = ServedModel("tiny", max_model_len=128, vocab_size=256, created_s=1700000000, artifact="sha256:ab")
STATS = {
    "num_requests_running": 2,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.25,
    "generation_tokens_total": 11,
    "requests_finished_stop": 3,
    "requests_finished_cancelled": 2,
    "requests_finished_error": 1,
    "compiles_after_ready_total": 0,
    "padded_rows_total": 5,
    "preemptions_total": 4,
    "bucket_steps": {"prefill-b1-q32": 1, "decode-b2-q1": 7},
    "decode_batch_steps": {"10": 4, "9": 3},
    "backends": {"decode-b2-q1": "inductor"},
    "spec_decode_num_drafts_total": 4,
    "spec_decode_num_draft_tokens_total": 12,
    "spec_decode_num_accepted_tokens_total": 7,
    "spec_decode_num_accepted_tokens_per_pos": {"0": 4, "1": 2, "2": 1},
    "something_new": 1.5,
    "websocket_connections": 0,
}


def read(
    stats: dict[str, object], prefix: str, model: ServedModel = MODEL
) -> tuple[dict[tuple[str, frozenset[tuple[str, str]]], float], dict[str, str]]:
    """Samples by name and labels, and types by name, of one prefix, which is left out."""
    found = list(text_string_to_metric_families(render_metrics(stats, model)))
    assert len({family.name for family in found}) == len(found)
    samples, types = {}, {}
    for family in found:
        if family.name.startswith(prefix):
            types[family.name.removeprefix(prefix)] = family.type
            for sample in family.samples:
                key = (sample.name.removeprefix(prefix), frozenset(sample.labels.items()))
                assert key not in samples
                samples[key] = sample.value
    return samples, types


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_our_metrics() -> None:
    samples, types = read(STATS, "npucompile:")
    assert samples == {
        key("num_requests_running"): 2,
        key("num_requests_waiting"): 0,
        key("kv_cache_usage_perc"): 0.25,
        key("generation_tokens_total"): 11,
        key("requests_finished_total", reason="stop"): 3,
        key("requests_finished_total", reason="cancelled"): 2,
        key("requests_finished_total", reason="error"): 1,
        key("compiles_after_ready_total"): 0,
        key("padded_rows_total"): 5,
        key("preemptions_total"): 4,
        key("bucket_steps_total", bucket="decode-b2-q1"): 7,
        key("bucket_steps_total", bucket="prefill-b1-q32"): 1,
        key("decode_batch_steps_total", batch_size="9"): 3,
        key("decode_batch_steps_total", batch_size="10"): 4,
        key("bucket_info", bucket="decode-b2-q1", backend="inductor"): 1,
        key("spec_decode_num_drafts_total"): 4,
        key("spec_decode_num_draft_tokens_total"): 12,
        key("spec_decode_num_accepted_tokens_total"): 7,
        key("spec_decode_num_accepted_tokens_per_pos_total", position="0"): 4,
        key("spec_decode_num_accepted_tokens_per_pos_total", position="1"): 2,
        key("spec_decode_num_accepted_tokens_per_pos_total", position="2"): 1,
        key("something_new"): 1.5,
        key("websocket_connections"): 0,
        key("artifact_info", model="tiny", artifact="sha256:ab"): 1,
    }
    counters = {name for name, kind in types.items() if kind == "counter"}
    assert counters == {name.removesuffix("_total") for name, _ in samples if name.endswith("_total")}
    assert set(types.values()) == {"counter", "gauge"}


def test_vllms_metrics_have_its_names_and_labels() -> None:
    samples, types = read(STATS, "vllm:")
    labels = {"model_name": "tiny", "engine": "0"}
    assert samples == {
        key("num_requests_running", **labels): 2,
        key("num_requests_waiting", **labels): 0,
        key("kv_cache_usage_perc", **labels): 0.25,
        key("generation_tokens_total", **labels): 11,
        key("num_preemptions_total", **labels): 4,
        key("request_success_total", finished_reason="stop", **labels): 3,
        key("request_success_total", finished_reason="abort", **labels): 2,
        key("request_success_total", finished_reason="error", **labels): 1,
        key("spec_decode_num_drafts_total", **labels): 4,
        key("spec_decode_num_draft_tokens_total", **labels): 12,
        key("spec_decode_num_accepted_tokens_total", **labels): 7,
        key("spec_decode_num_accepted_tokens_per_pos_total", position="0", **labels): 4,
        key("spec_decode_num_accepted_tokens_per_pos_total", position="1", **labels): 2,
        key("spec_decode_num_accepted_tokens_per_pos_total", position="2", **labels): 1,
    }
    assert types["num_requests_running"] == "gauge"


def test_histograms_are_cumulative_to_infinity() -> None:
    histogram = Histogram((0.5, 10))
    for value in (0.25, 0.5, 4.0, 99.0):
        histogram.observe(value)
    samples, types = read({"histograms": {"x_seconds": histogram.snapshot()}}, "vllm:x_")
    labels = {"model_name": "tiny", "engine": "0"}
    assert types == {"seconds": "histogram"}
    assert samples == {
        key("seconds_bucket", le="0.5", **labels): 2,
        key("seconds_bucket", le="10.0", **labels): 3,
        key("seconds_bucket", le="+Inf", **labels): 4,
        key("seconds_count", **labels): 4,
        key("seconds_sum", **labels): 103.75,
    }


def test_labels_are_escaped() -> None:
    name = 'a"b\\c\nd'
    assert read({"bucket_steps": {name: 1}}, "npucompile:")[0][key("bucket_steps_total", bucket=name)] == 1


def test_places_of_drafts_are_in_the_order_of_numbers() -> None:
    text = render_metrics({"spec_decode_num_accepted_tokens_per_pos": dict.fromkeys(map(str, reversed(range(12))), 0)}, MODEL)
    assert re.findall(r'npucompile.*position="(\d+)"', text) == [str(place) for place in range(12)]
    # A build without drafts says so by a metric without samples.
    assert "per_pos_total{" not in render_metrics({"spec_decode_num_accepted_tokens_per_pos": {}}, MODEL)


def test_how_uneven_experts_are_chosen_is_a_number_a_layer() -> None:
    # Counts end with the last expert that was chosen; this model has eight.
    counts = np.array([[1, 1, 1, 1], [0, 4, 0, 4]])
    samples, _ = read({"experts": counts}, "npucompile:", replace(MODEL, num_experts=8))
    assert [samples[key("expert_imbalance", layer=layer)] for layer in "01"] == [2.0, 4.0]


def test_every_help_is_one_line_and_ends() -> None:
    assert all("\n" not in text and text.endswith(".") for text in HELP.values())


@pytest.mark.parametrize("name", list(Latencies(8).snapshot()))
def test_every_histogram_has_help(name: str) -> None:
    assert name in HELP
