"""server/openai/tokens.py: token ids of texts and conversations, and back."""

from __future__ import annotations

import httpx
import pytest
from support.scripted import scripted
from support.texts import byte_codec

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate


@pytest.fixture(scope="module")
def client():
    form = ChatFormat(ChatTemplate("{{ messages[0].content }}{{ tools | length if tools }}{{ add_generation_prompt }}"))
    with scripted(chat=form) as (url, _), httpx.Client(base_url=url.removesuffix("/v1")) as client:
        yield client


def test_a_text_has_tokens(client):
    found = client.post("/tokenize", json={"model": "tiny", "prompt": "äb", "return_token_strs": True}).json()
    ids = list(byte_codec().encode("äb"))
    assert found == {"count": 3, "max_model_len": 4096, "tokens": ids, "token_strs": [byte_codec().token_text(i).text for i in ids]}
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "äb"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_conversation_has_tokens(client):
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "add_generation_prompt": False}
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    assert byte_codec().decode(tokens) == "a1False"


def test_bodies_of_completions_have_the_tokens_that_are_completed(client):
    asked = {"prompt": ["ab", [7, 8]], "max_tokens": 3, "stream": True}
    rendered = client.post("/v1/completions/render", json=asked).json()
    assert rendered == [{"token_ids": list(byte_codec().encode("ab"))}, {"token_ids": [7, 8]}]
    body = {"messages": [{"role": "user", "content": "a"}], "stream": False, "return_token_ids": True}
    rendered = client.post("/v1/chat/completions/render", json=body).json()
    assert rendered["token_ids"] == client.post("/v1/chat/completions", json=body).json()["choices"][0]["prompt_token_ids"]
    assert client.post("/v1/responses/render", json={"input": "a", "stream": True}).json() == rendered


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/v1/completions/render", {"prompt": [256]}, "prompt"),
        ("/v1/chat/completions/render", {"messages": [], "n": 1}, "messages"),
        ("/v1/responses/render", {"input": 1}, "input"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_what_has_none_is_refused_by_name(client, path, body, param):
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
