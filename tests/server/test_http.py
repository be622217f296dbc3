"""server/http.py: health, models and metrics over a real port."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from urllib.parse import urlsplit

import pytest
from tokenizers import Tokenizer, models
from websockets.sync.client import connect

from npucompile.server.http import HELP, render_metrics
from npucompile.server.lifecycle import Lifecycle
from npucompile.server.run import running, serving
from npucompile.server.service import ServedModel, Service
from npucompile.server.tokenizer import TextTokenizer

MODEL = ServedModel("tiny", max_model_len=128, vocab_size=256, created_s=1700000000, artifact="sha256:ab")
STATS = {
    "num_requests_running": 2,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.25,
    "generation_tokens_total": 11,
    "requests_finished_stop": 3,
    "requests_finished_error": 1,
    "compiles_after_ready_total": 0,
    "padded_rows_total": 5,
    "bucket_steps": {"prefill-b1-q32": 1, "decode-b2-q1": 7},
    "backends": {"decode-b2-q1": "inductor"},
    "spec_decode_num_drafts_total": 4,
    "spec_decode_num_draft_tokens_total": 12,
    "spec_decode_num_accepted_tokens_total": 7,
    "spec_decode_num_accepted_tokens_per_pos": {"0": 4, "1": 2, "2": 1},
    "something_new": 1.5,
}


class Engine:
    def stats(self):
        return STATS


@pytest.fixture(scope="module")
def readiness():
    return {"status": "starting", "compiled_buckets": 1}


@pytest.fixture(scope="module")
def url(readiness):
    service = Service(Engine(), TextTokenizer(Tokenizer(models.BPE())), MODEL, readiness=lambda: readiness)
    with serving(service) as url:
        yield url


def get(url, path, method="GET"):
    place = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(place.hostname, place.port, timeout=60)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()


@pytest.mark.parametrize(
    ("state", "alive", "ready"),
    [("ok", 200, 200), ("starting", 200, 503), ("failed", 503, 503), ("stuck", 503, 503), ("stopped", 503, 503)],
)
def test_liveness_and_readiness_are_told_apart(url, readiness, state, alive, ready):
    before = dict(readiness)
    readiness.update(status=state, compiled_buckets=2)
    for path, expected in (("/health", alive), ("/ready", ready)):
        status, headers, body = get(url, path)
        assert (status, headers["content-type"]) == (expected, "application/json")
        assert json.loads(body) == {"status": state, "compiled_buckets": 2}
    readiness.update(before)


def test_before_there_is_a_model_and_while_the_server_ends():
    lifecycle = Lifecycle()
    with running(lifecycle) as server:
        assert get(server.url, "/health")[0] == 200
        assert get(server.url, "/ready")[0] == 503
        for path in ("/v1/models", "/metrics"):
            status, headers, body = get(server.url, path)
            assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "2", "starting")
        lifecycle.service = Service(Engine(), TextTokenizer(Tokenizer(models.BPE())), MODEL)
        assert get(server.url, "/ready")[0] == get(server.url, "/v1/models")[0] == 200
        lifecycle.draining = True
        assert [get(server.url, path)[0] for path in ("/health", "/ready")] == [200, 503]
        assert "npucompile:draining 1\n" in get(server.url, "/metrics")[2]


def test_models_is_a_list_in_openai_shape(url):
    status, _, body = get(url, "/v1/models")
    assert status == 200
    model = {"id": "tiny", "object": "model", "created": 1700000000, "owned_by": "npucompile"}
    model |= {"max_model_len": 128, "artifact": "sha256:ab"}
    assert json.loads(body) == {"object": "list", "data": [model]}


def read_metrics(text):
    """Samples by name and labels, and types by name; as strict as the text format needs here."""
    samples, types = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("#"):
            _, word, name, rest = line.split(" ", 3)
            assert word in ("HELP", "TYPE")
            if word == "TYPE":
                assert name not in types
                types[name] = rest
        else:
            name, value = line.rsplit(" ", 1)
            assert name not in samples
            samples[name] = float(value)
    return samples, types


def test_metrics_have_the_engines_numbers(url):
    status, headers, body = get(url, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    samples, types = read_metrics(body)
    assert samples == {
        "npucompile:num_requests_running": 2,
        "npucompile:num_requests_waiting": 0,
        "npucompile:kv_cache_usage_perc": 0.25,
        "npucompile:generation_tokens_total": 11,
        'npucompile:requests_finished_total{reason="stop"}': 3,
        'npucompile:requests_finished_total{reason="error"}': 1,
        "npucompile:compiles_after_ready_total": 0,
        "npucompile:padded_rows_total": 5,
        'npucompile:bucket_steps_total{bucket="decode-b2-q1"}': 7,
        'npucompile:bucket_steps_total{bucket="prefill-b1-q32"}': 1,
        'npucompile:bucket_info{bucket="decode-b2-q1",backend="inductor"}': 1,
        "npucompile:spec_decode_num_drafts_total": 4,
        "npucompile:spec_decode_num_draft_tokens_total": 12,
        "npucompile:spec_decode_num_accepted_tokens_total": 7,
        'npucompile:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 4,
        'npucompile:spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 2,
        'npucompile:spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 1,
        "npucompile:something_new": 1.5,
        "npucompile:websocket_connections": 0,
        "npucompile:draining": 0,
        'npucompile:artifact_info{model="tiny",artifact="sha256:ab"}': 1,
    }
    assert {name for name, kind in types.items() if kind == "counter"} == {name for name in types if name.endswith("_total")}
    assert set(types) == {name.split("{")[0] for name in samples}


def test_open_sockets_are_counted(url):
    with connect(url, proxy=None, compression=None) as socket:
        socket.send("{")
        socket.recv(timeout=60)
        assert "npucompile:websocket_connections 1\n" in get(url, "/metrics")[2]


def test_labels_are_escaped():
    text = render_metrics({"bucket_steps": {'a"b\\c\nd': 1}}, MODEL)
    assert r'{bucket="a\"b\\c\nd"} 1' in text


def test_places_of_drafts_are_in_the_order_of_numbers():
    text = render_metrics({"spec_decode_num_accepted_tokens_per_pos": dict.fromkeys(map(str, reversed(range(12))), 0)}, MODEL)
    assert re.findall(r'position="(\d+)"', text) == [str(place) for place in range(12)]
    # A build without drafts says so by a metric without samples.
    assert "per_pos_total{" not in render_metrics({"spec_decode_num_accepted_tokens_per_pos": {}}, MODEL)


def test_every_help_is_one_line_and_ends():
    assert all("\n" not in text and text.endswith(".") for text in HELP.values())


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/health", 405), ("GET", "/v1/responses", 405)])
def test_what_is_not_there_is_an_openai_error(url, method, path, status):
    actual, _, body = get(url, path, method)
    assert actual == status
    assert set(json.loads(body)["error"]) == {"type", "code", "message", "param"}
