"""Calls that a stop string or a limit cuts: never told as calls to be run, and what is sent back or kept of them is in the next prompt."""

from __future__ import annotations

import json

import openai
import pytest
from support.calls import written
from support.scripted import scripted

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.parsers.call_formats import FORMATS

SHOWN = {
    "text": "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
    "json": "{{ call.arguments | tojson }}",
    "items": "{% for name, value in call.arguments | items %}{{ name }}={{ value }}{% endfor %}",
    "method": "{% for name, value in call.arguments.items() %}{{ name }}={{ value }}{% endfor %}",
}
"""How templates show arguments."""

TEMPLATE = """{%- for m in messages %}<{{ m.content }}>
{%- for c in m.tool_calls or [] %}{% set call = c.function %}[{{ call.name }} SHOWN]{% endfor %}{% endfor %}"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
USER = [{"role": "user", "content": "hi"}]
ARGUMENTS = {"a": "some long text"}


def says(form):
    """A call the first time, and then the prompt."""
    call = written(form, ("f", ARGUMENTS))
    return lambda prompt: call if prompt == "<hi>" else prompt


def serving(form, shown="text"):
    template = ChatTemplate(TEMPLATE.replace("SHOWN", SHOWN[shown]))
    return scripted(says(form), chat=ChatFormat(template, None, form))


def connected(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


CUTS = [({"stop": "long"}, "stop"), ({"stop": ["me l", "text"]}, "stop"), ({"max_tokens": 40}, "length"), ({"stop": "never"}, "tool_calls")]


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_is_cut_is_no_reason_to_run_tools(form):
    with serving(form) as (url, _):
        client = connected(url)
        for limits, reason in CUTS:
            whole = client.chat.completions.create(model="tiny", messages=USER, tools=[CHAT_TOOL], **limits).choices[0]
            chunks = client.chat.completions.create(model="tiny", messages=USER, tools=[CHAT_TOOL], stream=True, **limits)
            streamed = [chunk.choices[0].finish_reason for chunk in chunks][-1]
            assert whole.finish_reason == streamed
            for call in whole.message.tool_calls or []:
                if whole.finish_reason == "tool_calls":
                    assert json.loads(call.function.arguments) == ARGUMENTS
            assert (whole.finish_reason == "tool_calls") == (reason == "tool_calls")
            response = client.responses.create(
                model="tiny",
                input=USER,
                tools=[TOOL],
                **({"max_output_tokens": limits["max_tokens"]} if "max_tokens" in limits else {"extra_body": limits}),
            )
            for item in response.output:
                if item.type == "function_call":
                    assert (item.status == "completed") == (reason == "tool_calls")


@pytest.mark.parametrize(("shown", "text"), [("text", '{"a": "some '), ("json", json.dumps('{"a": "some '))])
@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_a_call_that_was_cut_is_in_the_next_prompt(form, shown, text):
    with serving(form, shown) as (url, _):
        client = connected(url)
        message = client.chat.completions.create(model="tiny", messages=USER, tools=[CHAT_TOOL], stop="long").choices[0].message
        turns = [*USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "what?"}]
        expected = f"<hi><>[f {text}]<what?>"
        assert client.chat.completions.create(model="tiny", messages=turns).choices[0].message.content == expected
        response = client.responses.create(model="tiny", input=USER, tools=[TOOL], extra_body={"stop": "long"})
        output = {"type": "function_call_output", "call_id": response.output[0].call_id, "output": "what?"}
        whole = client.responses.create(model="tiny", input=[*USER, *response.output, output])
        kept = client.responses.create(model="tiny", input=[output], previous_response_id=response.id)
        assert whole.output_text == kept.output_text == expected


@pytest.mark.parametrize("shown", ["items", "method"])
@pytest.mark.parametrize(
    ("stop", "arguments"),
    [("long", "a=some "), ("me long", "a=so"), ('"some', ""), (' "some', "")],
)
def test_a_template_that_shows_objects_alone_shows_what_is_whole_of_a_cut_call(shown, stop, arguments):
    with serving("hermes", shown) as (url, _):
        client = connected(url)
        message = client.chat.completions.create(model="tiny", messages=USER, tools=[CHAT_TOOL], stop=stop).choices[0].message
        response = client.responses.create(model="tiny", input=USER, tools=[TOOL], extra_body={"stop": stop})
        expected = f"<hi><>[f {arguments}]<b>"
        turn = {"role": "user", "content": "b"}
        assert client.chat.completions.create(model="tiny", messages=[*USER, message, turn]).choices[0].message.content == expected
        for turns in ({"input": [*USER, *response.output, turn]}, {"input": "b", "previous_response_id": response.id}):
            assert client.responses.create(model="tiny", **turns).output_text == expected


@pytest.mark.parametrize(("arguments", "expected"), [("null", ""), ("[1]", "arguments=[1]"), ("not JSON", "arguments=not JSON")])
def test_arguments_that_are_no_object_keep_no_conversation_from_going_on(arguments, expected):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    with serving("hermes", "items") as (url, _):
        client = connected(url)
        chat = client.chat.completions.create(model="tiny", messages=[*USER, {"role": "assistant", "tool_calls": [call]}])
        assert chat.choices[0].message.content == f"<hi><>[f {expected}]"
        assert client.responses.create(model="tiny", input=[*USER, item]).output_text == f"<hi><>[f {expected}]"
