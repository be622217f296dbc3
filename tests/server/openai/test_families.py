"""Chats with models of each family through openai's client: its published template, its own marks as its tokenizer has them."""

from __future__ import annotations

import json
from dataclasses import replace

import openai
import pytest
from support.calls import written
from support.family_templates import FAMILIES
from support.grammars import EOS
from support.marked import marked
from support.scripted import MODEL, scripted

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.text.tokenizer import TextTokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
NAMED = {"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
USER = [{"role": "user", "content": "How?"}]


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture
def served(name):
    family, known = FAMILIES[name], marked(name)
    form = ChatFormat.of(ChatTemplate(family.template, {"bos_token": "<s>", "eos_token": "</s>"}))
    assert (form.reasoning, form.tool_calls) == family.parsers
    model = replace(MODEL, vocab_size=known.size, eos_token_ids=frozenset({EOS}))
    with scripted(lambda _: family.reply, chat=form, codec=TextTokenizer(known.tokenizer), model=model) as (url, engine):
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0), engine


def joined(chunks):
    message = {}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        for field in ("content", "reasoning_content"):
            if text := getattr(delta, field, None):
                message[field] = message.get(field, "") + text
        for call in delta.tool_calls or []:
            calls = message.setdefault("tool_calls", {})
            # An id and a name come once, and arguments behind them.
            own = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            assert call.id == own["id"] or call.id is call.function.name is None
            own["arguments"] += call.function.arguments or ""
    return message, chunks[-1].choices[0].finish_reason


def shown(message):
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    return getattr(message, "reasoning_content", None), message.content, calls


@pytest.mark.parametrize("drafts", [0, 3, 30])
def test_a_call_is_told_whole_and_streamed_and_is_the_next_prompt(name, served, drafts):
    """Drafts bring several marks in one step."""
    client, engine = served
    family = FAMILIES[name]
    extra = {"extra_body": {"speculative_tokens": drafts}} if drafts else {}
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL], **extra).choices[0]
    reasoning = "I ask." if family.parsers[0] else None
    assert shown(answer.message) == (reasoning, None, [("weather", {"city": "Rome", "days": 2})])
    assert answer.finish_reason == "tool_calls"
    message, reason = joined(list(client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL], stream=True, **extra)))
    (call,) = message.pop("tool_calls").values()
    assert (call["name"], json.loads(call["arguments"]), reason) == ("weather", {"city": "Rome", "days": 2}, "tool_calls")
    assert message == ({"reasoning_content": reasoning} if reasoning else {})
    assert (call["id"] == "functions.weather:0") == (family.parsers[1] == "kimi_k2")

    turns = [*USER, answer.message, {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "sunny"}]
    client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL])
    assert marked(name).text(engine.requests[-1].prompt).endswith(family.turn)


def test_ids_of_others_are_the_models_own_in_the_next_prompt(name, served):
    client, engine = served
    call = {"id": "toolu_17", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    turns = [*USER, {"role": "assistant", "reasoning_content": "I ask.", "tool_calls": [call]}]
    client.chat.completions.create(model="tiny", messages=[*turns, {"role": "tool", "tool_call_id": "toolu_17", "content": "sunny"}])
    assert marked(name).text(engine.requests[-1].prompt).endswith(FAMILIES[name].turn)


@pytest.mark.parametrize(
    ("options", "free"),
    [
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, False),
        (NAMED, False),
        ({"tools": [STRICT]}, True),
    ],
)
def test_what_must_be_called_is_a_grammar_of_its_own_marks(name, served, options, free):
    client, engine = served
    known, reply = marked(name), FAMILIES[name].reply.removeprefix("<|python_tag|>").replace("[TOOL_CALLS] [", "[TOOL_CALLS][")
    client.chat.completions.create(model="tiny", messages=USER, **options)
    constraint = engine.requests[-1].constraint
    assert known.follows(constraint, reply)
    assert known.follows(constraint, "Yes, sunny.</think>\n\nSo." if FAMILIES[name].parsers[0] else "So.") == free
    for wrong in (reply.replace("2", '"2"'), reply.replace("2", "two"), reply.replace("days", "hours")):
        assert not known.follows(constraint, wrong)
    form = FAMILIES[name].parsers[1]
    thought = reply.removesuffix(written(form, ("weather", {"city": "Rome", "days": 2})))
    assert thought != reply
    assert known.follows(constraint, thought + written(form, ("now", {}))) == (options is not NAMED and OTHER in options["tools"])


def test_text_and_calls_without_arguments_go_on(name, served):
    """What is said beside a call is content; a call of a tool without parameters has an empty object."""
    client, engine = served
    closing = "I ask.</think>" if FAMILIES[name].parsers[0] else ""
    begin = "<think>" if name == "GLM-4.6" else ""
    engine.says = lambda _: f"{begin}{closing}I look.\n\n" + written(FAMILIES[name].parsers[1], ("now", {}), ("now", {}))
    message = client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL, OTHER]).choices[0].message
    assert shown(message) == ("I ask." if closing else None, "I look.", [("now", {}), ("now", {})])
    assert len({call.id for call in message.tool_calls}) == 2
