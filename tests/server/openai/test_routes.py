"""server/openai/routes.py: whatever is sent, the answer is OpenAI's object, and the server's own faults are told without detail."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted import scripted

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.guard.refusals import Refusals
from npucompile.server.openai.routes import POSTS

PATHS = [post.path for post in POSTS]


@pytest.fixture(scope="module")
def client():
    form = ChatFormat(ChatTemplate("{{ messages[0].content }}"))
    with scripted(lambda prompt: prompt[:4], chat=form) as (url, _), httpx.Client(base_url=url.removesuffix("/v1")) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "code"), [(b"{", "invalid_json"), (b"\xff", "invalid_utf8"), (b"[]", "not_an_object"), (b" " * (2**22 + 1), "body_too_large")]
)
def test_what_is_no_body_is_refused(client, path, body, code):
    answer = client.post(path, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413 if code == "body_too_large" else 400, code)


IN_EVERY_PLACE = (
    '{{"metadata":{{"k":{}}}}}',
    '{{"messages":[{{"role":"user","content":{}}}]}}',
    '{{"tools":[{{"type":"function","name":"f","description":{}}}]}}',
    '{{{}:1}}',
    '{{"prompt":[{}]}}',
)  # fmt: skip
NO_TEXT = (r'"a\ud83d"', r'"\ude00b"', '"\xed\xa0\xbd"', r'"\uD83D\u0041"')


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", IN_EVERY_PLACE)
@pytest.mark.parametrize("text", NO_TEXT)
def test_half_a_surrogate_pair_is_refused_wherever_it_is(client, path, place, text):
    answer = client.post(path, content=place.format(text).encode("latin-1"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_utf8")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "[1, Infinity]"])
def test_what_json_has_no_number_for_is_refused(client, path, number):
    answer = client.post(path, content=f'{{"temperature":{number}}}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("path", PATHS)
def test_a_compressed_body_is_refused_by_its_encoding(client, path):
    answer = client.post(path, content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert "'gzip'" in answer.json()["error"]["message"]
    plain = client.post(path, content=b"[]", headers={"Content-Encoding": "identity"})
    assert plain.json()["error"]["code"] == "not_an_object"


@pytest.mark.parametrize("path", PATHS)
def test_another_method_is_refused(client, path):
    # Nothing is kept under this id.
    assert client.get(path).status_code == (404 if path == "/v1/responses/render" else 405)


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


def test_large_requests_that_are_refused_take_a_share_of_the_processor(monkeypatch):
    """The second waits before it is parsed, and another client's does not."""
    plain, owed = Refusals.owed_s, []

    def owed_s(self, client, work_s=0.0):
        owed.append((client, plain(self, client, work_s)))
        return owed[-1][1]

    monkeypatch.setattr(Refusals, "owed_s", owed_s)
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * 20_000, "max_tokens": 4}).encode()
    with scripted(chat=ChatFormat(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))) as (url, _):

        def waits(address):
            owed.clear()
            with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60) as client:
                answer = client.post(f"{url}/chat/completions", content=body)
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert {client for client, _ in owed} == {address}
            return owed[0][1]

        assert waits("127.0.0.1") == 0
        assert waits("127.0.0.1") > 0
        assert waits("127.0.0.2") == 0
