"""server/requests/router_fields.py: what routers add asks for nothing or is refused, and a handover is taken out of a body."""

from __future__ import annotations

import httpx
import pytest
from support.scripted import scripted

from npucompile.server.openai.generate import GenerateRequest
from npucompile.server.openai.request_models import ChatRequest, CompletionRequest
from npucompile.server.requests.bodies import validate
from npucompile.server.requests.create_body import CreateFields
from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.router_fields import HandoverFields, RouterFields, handover_of

LEAST = {
    CreateFields: {"input": "a"}, ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"}, GenerateRequest: {"text": "a"},
}  # fmt: skip
PATHS = {"/v1/completions": {"prompt": "ab"}, "/generate": {"text": "ab"}, "/v1/responses": {"input_token_ids": [97, 98]}}


@pytest.mark.parametrize("model", LEAST, ids=lambda model: model.__name__)
@pytest.mark.parametrize("name", RouterFields.model_fields)
def test_every_body_takes_the_value_that_asks_for_nothing_and_no_other(model, name):
    neutral = name == "stream_reasoning"
    validate(model, LEAST[model] | {name: neutral}, "/path")
    validate(model, LEAST[model] | {name: None}, "/path")
    with pytest.raises(FieldError, match=f"^{name} is {not neutral}, which is not supported") as caught:
        validate(model, LEAST[model] | {name: not neutral}, "/path")
    assert (caught.value.code, caught.value.param) == ("unsupported_value", name)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict.fromkeys(HandoverFields.model_fields),
        {"bootstrap_port": [None, None]},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": False, "remote_host": None}},
    ],
)
def test_a_body_that_asks_for_no_handover_is_as_one_without_these_fields(fields):
    body = {"prompt": "a", **fields}
    assert handover_of(body, "/path") is None
    assert body == {"prompt": "a"}


@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_host": "10.0.0.1", "bootstrap_port": None, "bootstrap_room": 2**63 - 1},
        {"bootstrap_host": ["p", "p"], "bootstrap_port": [8998, None], "bootstrap_room": [0, 1]},
        {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    ],
)
def test_a_handover_is_taken_out(fields):
    body = {"prompt": "a", **fields}
    handover = handover_of(body, "/path")
    assert handover is not None
    assert {name: getattr(handover, name) for name in fields} == fields
    assert body == {"prompt": "a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"bootstrap_room": True}, "bootstrap_room"),
        ({"bootstrap_port": 0}, "bootstrap_port"),
        ({"bootstrap_host": 7}, "bootstrap_host"),
        ({"kv_transfer_params": "x"}, "kv_transfer_params"),
    ],
)
def test_what_is_no_handover_is_named(fields, param):
    with pytest.raises(FieldError) as caught:
        handover_of(fields, "/path")
    assert caught.value.param.startswith(param)


@pytest.fixture(scope="module")
def served():
    with scripted() as (url, engine), httpx.Client(base_url=url.removesuffix("/v1"), timeout=30) as client:
        yield client, engine


@pytest.mark.parametrize("path", PATHS)
def test_a_server_without_a_role_says_so(served, path):
    client, engine = served
    count = len(engine.requests)
    for fields in ({"bootstrap_room": 7}, {"kv_transfer_params": {"do_remote_decode": True}}):
        refused = client.post(path, json=PATHS[path] | fields)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "no_role", *fields)
        assert "--role" in error["message"]
    assert len(engine.requests) == count
    assert client.post(path, json=PATHS[path] | dict.fromkeys(HandoverFields.model_fields)).status_code == 200


def test_lengths_at_the_top_go_before_those_of_sampling_params(served):
    client, engine = served
    params = {"max_new_tokens": 7, "min_new_tokens": 5}
    assert client.post("/generate", json={"text": "ab", "sampling_params": params, "max_tokens": 1, "min_tokens": 1}).status_code == 200
    assert (engine.requests[-1].max_tokens, engine.requests[-1].sampling.min_tokens) == (1, 1)
    assert client.post("/generate", json={"text": "ab", "sampling_params": params, "max_tokens": 6}).status_code == 200
    assert (engine.requests[-1].max_tokens, engine.requests[-1].sampling.min_tokens) == (6, 5)


def test_an_unknown_model_is_none_of_smg_and_of_generate_alone(served):
    client, _ = served
    assert client.post("/generate", json={"text": "ab", "model": "unknown"}).status_code == 200
    assert client.post("/generate", json={"text": "ab", "model": "another"}).json()["error"]["code"] == "model_not_found"
    assert client.post("/v1/completions", json={"prompt": "ab", "model": "unknown"}).json()["error"]["code"] == "model_not_found"
