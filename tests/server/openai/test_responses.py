"""server/openai/responses.py: responses as openai-python sees them, and the same events as on the websocket."""

from __future__ import annotations

import asyncio

import openai
import pytest
from support.scripted import scripted

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.client import Client

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
DIGITS = {"structured_outputs": {"regex": "[0-9]+"}}


@pytest.fixture(scope="module")
def served():
    with scripted(chat=ChatFormat(ChatTemplate(TEMPLATE))) as (url, engine):
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0), engine, url


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
        "include": [], "previous_response_id": None, "extra_body": {"stream_options": {"include_obfuscation": True}},
    }  # fmt: skip
    assert client.responses.create(model="tiny", input="a", **neutral).output_text == "ua"


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"model": "gpt"}, "model", "served here is 'tiny'"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "--tool-call-parser"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "no such setting"),
        (
            {"text": {"format": {"type": "json_object"}}, "extra_body": DIGITS},
            "structured_outputs",
            "one of",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole input without it"),
        ({"extra_body": {"stream_id": "a"}}, "stream_id", "websockets"),
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


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TALK = "{{ messages[-1].content }}{% if messages[-1].role == 'user' %}<think>{% endif %}"
USER = [{"role": "user", "content": f"hm</think>\n\nI call.\n{CALL}"}]


def after_think(prompt):
    """The model says what the user said: reasoning, text and a call."""
    return prompt.removesuffix("<think>")


@pytest.fixture(scope="module")
def thinking():
    form = ChatFormat.of(ChatTemplate(TALK), "qwen3", "hermes")
    with scripted(after_think, chat=form) as (url, engine):
        yield url, engine


def check(response):
    thought, said, call = response.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "hm", [])
    assert (said.type, said.content[0].text, response.output_text) == ("message", "I call.", "I call.")
    assert (call.type, call.name, call.arguments, call.status) == ("function_call", "f", '{"a": 1}', "completed")
    assert response.tools[0].name == "f"
    assert response.usage.output_tokens_details.reasoning_tokens == len("hm</think>")


def test_reasoning_and_calls_are_items_and_go_back_as_input(thinking):
    client = openai.OpenAI(base_url=thinking[0], api_key="none", max_retries=0)
    response = client.responses.create(model="tiny", input=USER, tools=[TOOL], instructions="be brief")
    check(response)
    result = {"type": "function_call_output", "call_id": response.output[2].call_id, "output": "12"}
    for turn in (
        {"input": [*USER, *response.output, result]},
        {"input": [result], "previous_response_id": response.id},
    ):
        assert client.responses.create(model="tiny", tools=[TOOL], **turn).output_text == "12"
    with client.responses.stream(model="tiny", input=USER, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        check(stream.get_final_response())
    assert kinds.count("response.function_call_arguments.delta") == len('{"a": 1}')
    assert kinds.count("response.reasoning_text.delta") == len("hm")


def test_tools_that_are_not_to_be_called_are_text(thinking):
    client = openai.OpenAI(base_url=thinking[0], api_key="none", max_retries=0)
    response = client.responses.create(model="tiny", input=USER, tools=[TOOL], tool_choice="none")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text == f"I call.\n{CALL}"
    several = client.responses.create(model="tiny", input=USER, extra_body={"n": 2})
    assert [item.content[0].text for item in several.output] == [USER[0]["content"]] * 2
    with pytest.raises(openai.BadRequestError, match="there are tools"):
        client.responses.create(model="tiny", input=USER, tools=[TOOL], extra_body={"n": 2})
