"""server/openai/responses.py: responses as openai-python sees them, and the same events as on the websocket."""

from __future__ import annotations

import asyncio

import openai
import pytest
from support.scripted import scripted

from npucompile.server.chat_format import ChatFormat
from npucompile.server.chat_template import ChatTemplate
from npucompile.server.client import Client

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


DIGITS = {"structured_outputs": {"regex": "[0-9]+"}}


@pytest.fixture(scope="module")
def served():
    with scripted(chat=ChatFormat(ChatTemplate(TEMPLATE))) as (url, engine):
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0), engine, url


@pytest.fixture
def client(served):
    return served[0]


def test_a_text_is_what_the_user_says(client, served):
    response = client.responses.create(model="tiny", input="äb", instructions="be brief", metadata={"k": "v"}, max_output_tokens=4)
    assert (response.object, response.status, response.model) == ("response", "incomplete", "tiny")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "sbe "
    assert (response.instructions, response.metadata, response.temperature) == ("be brief", {"k": "v"}, 1.0)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (13, 4)
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert served[1].requests[-1].sampling.temperature == 1.0


def test_a_stream_has_every_event(client):
    events = list(client.responses.create(model="tiny", input="ab", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[4:-4] == ["response.output_text.delta"] * 3
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "uab"
    assert events[-1].response.output_text == "uab"
    assert all(type(event).__module__.startswith("openai.types.responses") for event in events)
    with client.responses.stream(model="tiny", input="ab") as stream:
        assert stream.get_final_response().output_text == "uab"


def test_messages_are_the_same_over_the_websocket(client, served):
    first = client.responses.create(model="tiny", input="a")
    turns = [{"role": "user", "content": "a"}, *(item.to_dict() for item in first.output), {"role": "user", "content": "b"}]
    over_http = client.responses.create(model="tiny", input=turns)

    async def over_websocket():
        async with await Client.connect(served[2].replace("http", "ws") + "/responses") as socket:
            return await socket.create(turns).completion()

    assert over_http.output_text == asyncio.run(over_websocket()).text == "uaauaub"


def test_neutral_values_are_no_error(client):
    neutral = {
        "tools": [], "metadata": {}, "store": False, "user": "me", "parallel_tool_calls": True, "truncation": "disabled",
        "text": {"format": {"type": "text"}}, "reasoning": None, "background": False, "service_tier": "auto", "tool_choice": "auto",
        "include": [], "previous_response_id": None,
    }  # fmt: skip
    assert client.responses.create(model="tiny", input="a", **neutral).output_text == "ua"


def test_log_probabilities_are_in_the_output(client):
    response = client.responses.create(model="tiny", input="a", include=["message.output_text.logprobs"], top_logprobs=1)
    logprobs = response.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob, len(entry.top_logprobs)) for entry in logprobs] == [("u", 0.0, 1), ("a", -1.0, 1)]


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"model": "gpt"}, "model", "served here is 'tiny'"),
        ({"store": True}, "store", "not kept"),
        ({"tools": [{"type": "web_search"}]}, "tools", "/v1/chat/completions"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_object' and 'json_schema'"),
        (
            {"text": {"format": {"type": "json_object"}}, "extra_body": DIGITS},
            "structured_outputs",
            "one of",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole input"),
        ({"extra_body": {"stream_id": "a"}}, "stream_id", "websockets"),
        ({"extra_body": {"temprature": 1}}, "temprature", "legal fields are"),
        ({"extra_body": {"stream": 1}}, "stream", "true or false"),
        ({"extra_body": {"stream_options": {"include_obfuscation": False, "x": 1}}}, "stream_options", "absent"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, options, param, words):
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(**{"model": "tiny", "input": "a", **options})
    assert caught.value.status_code == (404 if param == "model" else 400)
    assert caught.value.param == param
    assert words in caught.value.message
