"""Requests that run out of time, on a real engine: what each endpoint answers, and that their places are free at once."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest
from support import toy_device as toy
from support.texts import byte_codec

from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.run import serving

PAUSE_S, TIMEOUT_MS, TOKENS = 0.04, 500, 29
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def served():
    """One request at a time, of up to 29 steps that take 40 ms or more each: more than any may take."""
    world = toy.serving(toy.limits_of(4, 9, 1, 32), clock=time.monotonic, refresh_every_s=None, on_run=lambda: time.sleep(PAUSE_S))
    world.engine.start()
    service = Service(world.engine, byte_codec(), ServedModel("toy", 32, 13), limits=SocketLimits(request_timeout_s=60.0))
    try:
        with serving(service) as url:
            yield url.replace("ws://", "http://").removesuffix("/responses"), world.engine
    finally:
        world.engine.stop(drain=False)


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=served[0], api_key="none", max_retries=0)


@pytest.fixture
def busy(client, served):
    """Somebody else has the only slot, for longer than anybody waits here."""
    release = threading.Event()

    def hold():
        with client.completions.create(model="toy", prompt=PROMPT, max_tokens=TOKENS, stream=True) as stream:
            next(iter(stream))
            started.set()
            release.wait(30)

    started = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert started.wait(30)
    yield
    release.set()
    thread.join()


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


FEW = {"max_new_tokens": 5}
LATE = {"timeout_ms": TIMEOUT_MS}


def test_what_has_tokens_is_answered_with_them(client, served):
    answer = client.completions.create(model="toy", prompt=PROMPT, max_tokens=TOKENS, extra_body={**LATE, "return_token_ids": True})
    (choice,) = answer.choices
    assert choice.finish_reason == "timeout"
    assert 1 <= len(choice.token_ids) == answer.usage.completion_tokens < TOKENS
    status, body = post(
        served[0].removesuffix("/v1") + "/generate",
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0}, **LATE},
    )
    assert (status, body["meta_info"]["finish_reason"]["type"], body["meta_info"]["finish_reason"]["status_code"]) == (200, "abort", 504)
    assert body["output_ids"]
    # Slots and pages are free again.
    assert served[1].stats()["kv_cache_usage_perc"] == 0


def test_a_stream_has_its_tokens_the_finish_reason_and_an_error(client):
    stream = client.completions.create(model="toy", prompt=PROMPT, max_tokens=TOKENS, stream=True, extra_body=LATE)
    reasons = []
    with pytest.raises(openai.APIError, match=f"it was allowed {TIMEOUT_MS} ms") as caught:
        reasons.extend(choice.finish_reason for chunk in stream for choice in chunk.choices)
    assert caught.value.code == "timeout"
    assert reasons[-1] == "timeout"
    assert len(reasons) > 1
    assert not any(reasons[:-1])


@pytest.mark.usefixtures("busy")
def test_what_waits_is_answered_with_504(client, served):
    with pytest.raises(openai.InternalServerError, match="allowed 50 ms and was waiting") as caught:
        client.completions.create(model="toy", prompt=PROMPT, extra_body={"timeout_ms": 50})
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (504, "timeout", "server_error")
    root = served[0].removesuffix("/v1")
    assert post(f"{root}/generate", {"input_ids": PROMPT, "sampling_params": FEW, "timeout_ms": 50})[0] == 504
    status, answer = post(f"{served[0]}/responses", {"input_token_ids": PROMPT, "timeout_ms": 50})
    assert (status, answer["error"]["code"]) == (504, "timeout")


def test_a_response_that_began_has_failed(client):
    stream = client.responses.create(model="toy", input="", extra_body={"input": None, "input_token_ids": PROMPT, **LATE}, stream=True)
    *_, last = stream
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "timeout")
    assert last.response.usage.output_tokens > 0
