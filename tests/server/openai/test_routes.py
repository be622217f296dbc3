"""server/openai/routes.py: whatever is sent, the answer is OpenAI's object, and the server's own faults are told without detail."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted import scripted

from npucompile.server.chat_format import ChatFormat
from npucompile.server.chat_template import ChatTemplate
from npucompile.server.openai.routes import POSTS

PATHS = [post.path for post in POSTS]


@pytest.fixture(scope="module")
def client():
    form = ChatFormat(ChatTemplate("{{ messages[0].content }}"))
    with scripted(lambda prompt: prompt[:4], chat=form) as (url, _), httpx.Client(base_url=url.removesuffix("/v1")) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("body", "code"), [(b"{", "invalid_json"), (b"[]", "not_an_object"), (b" " * (2**22 + 1), "body_too_large")])
def test_what_is_no_body_is_refused(client, path, body, code):
    answer = client.post(path, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413 if code == "body_too_large" else 400, code)


@pytest.mark.parametrize("path", PATHS)
def test_another_method_is_refused(client, path):
    assert client.get(path).status_code == 405


FIELDS = ["prompt", "messages", "input", "text", "tokens", "input_ids", "max_tokens", "n", "stop", "temperature", "stream", "echo", "rid"]
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 2.5, -1, "", "a", 2**70]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=3),
    max_leaves=5,
)
MESSAGES = st.just([{"role": "user", "content": "ab"}])
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES | MESSAGES, max_size=4)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40)
@given(body=BODIES)
def test_any_body_is_answered_or_refused(client, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_fault_of_the_server_has_no_detail(client, monkeypatch, caplog):
    def broken(*_, **__):
        raise KeyError("a secret")

    monkeypatch.setattr("npucompile.server.openai.api.Api.generate", broken)
    answer = client.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer.text
    assert "secret" in caplog.text
