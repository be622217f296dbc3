"""Chats with models of each family through anthropic's client and openai's items: their own marks, whole and streamed."""

from __future__ import annotations

import dataclasses
import json

import anthropic
import openai
import pytest
from support.family_templates import FAMILIES
from support.grammars import EOS
from support.marked import marked
from support.scripted import MODEL, scripted

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.text.tokenizer import TextTokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
USER = [{"role": "user", "content": "How?"}]
ROME = {"city": "Rome", "days": 2}


@pytest.fixture(params=FAMILIES)
def served(request):
    family, known = FAMILIES[request.param], marked(request.param)
    form = ChatFormat.of(ChatTemplate(family.template, {"bos_token": "<s>", "eos_token": "</s>"}))
    model = dataclasses.replace(MODEL, vocab_size=known.size, eos_token_ids=frozenset({EOS}))
    with scripted(lambda _: family.reply, chat=form, codec=TextTokenizer(known.tokenizer), model=model) as (url, engine):
        yield url, lambda: known.text(engine.requests[-1].prompt), family


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_blocks_are_told_and_sent_back(served, streams):
    url, prompt, family = served
    tool = {"name": "weather", "input_schema": PARAMETERS}
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        options = {"model": "tiny", "max_tokens": 400, "messages": USER, "tools": [tool]}
        if streams:
            with client.messages.stream(**options) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**options)
        *thoughts, used = answer.content
        assert [block.thinking for block in thoughts] == (["I ask."] if family.parsers[0] else [])
        assert (used.name, used.input, answer.stop_reason) == ("weather", ROME, "tool_use")
        turns = [
            *USER,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}]},
        ]
        client.messages.create(**options | {"messages": turns})
    assert prompt().endswith(family.turn)


@pytest.mark.parametrize("streams", [False, True])
def test_openais_items_are_told_and_sent_back(served, streams):
    url, prompt, family = served
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    if streams:
        with client.responses.stream(model="tiny", input=USER, tools=[tool]) as stream:
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(model="tiny", input=USER, tools=[tool])
    *_, call = answer.output
    assert (call.name, json.loads(call.arguments)) == ("weather", ROME)
    assert (call.call_id == "functions.weather:0") == (family.parsers[1] == "kimi_k2")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(model="tiny", input=[*USER, *answer.output, output], tools=[tool])
    assert prompt().endswith(family.turn)
