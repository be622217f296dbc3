"""server/pages/probes.py: health, models and metrics over a real port."""

from __future__ import annotations

import contextlib
import http.client
import json
from urllib.parse import urlsplit

import pytest
from tokenizers import Tokenizer, models
from websockets.sync.client import connect

from npucompile.server.engine.lifecycle import Lifecycle
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.run import running, serving
from npucompile.server.text.tokenizer import TextTokenizer

MODEL = ServedModel("tiny", max_model_len=128, vocab_size=256, created_s=1700000000, artifact="sha256:ab")
STATS = {"num_requests_running": 2, "generation_tokens_total": 11}


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
        assert "npucompile:draining 1.0\n" in get(server.url, "/metrics")[2]


def test_models_is_a_list_in_openai_shape(url):
    status, _, body = get(url, "/v1/models")
    assert status == 200
    model = {"id": "tiny", "object": "model", "created": 1700000000, "owned_by": "npucompile"}
    model |= {"max_model_len": 128, "artifact": "sha256:ab"}
    assert json.loads(body) == {"object": "list", "data": [model]}


def test_metrics_have_the_engines_numbers(url):
    status, headers, body = get(url, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    # The format and every name are in test_exposition.py.
    assert "npucompile:generation_tokens_total 11.0\n" in body
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 11.0\n' in body


def test_open_sockets_are_counted(url):
    with connect(url, proxy=None, compression=None) as socket:
        socket.send("{")
        socket.recv(timeout=60)
        assert "npucompile:websocket_connections 1.0\n" in get(url, "/metrics")[2]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/health", 405), ("GET", "/v1/responses", 405)])
def test_what_is_not_there_is_an_openai_error(url, method, path, status):
    actual, _, body = get(url, path, method)
    assert actual == status
    assert set(json.loads(body)["error"]) == {"type", "code", "message", "param"}


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("GET", "/models", "did you mean /v1/models?"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/response", "did you mean /v1/responses?"),
        ("POST", "/tokenise", "did you mean /tokenize?"),
        ("POST", "/v1/embeddings", "'/v1/embeddings'; served are /, /health"),
        ("GET", "/docs", "/v1/responses, "),
        ("GET", "/x" * 5000, "served are /, /health"),
        ("GET", "/v1/completions", "legal is POST"),
    ],
)
def test_what_is_there_instead_is_said(url, method, path, said):
    message = json.loads(get(url, path, method)[2])["error"]["message"]
    assert said in message
    assert len(message) < 1000
