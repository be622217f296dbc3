"""server/openai/chat.py and chat_choice.py: chats as openai-python and LangChain see them. The engine repeats its prompt, so that the
last message is what the model says; a template ends in what the prompt is to end in."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import replace

import openai
import pytest
from support.grammars import EOS, SPECIAL, SPELT, TEXT, vocabulary
from support.scripted import MODEL, scripted
from support.texts import byte_codec, byte_tokenizer
from tokenizers import AddedToken

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.text.tokenizer import TextTokenizer

TEMPLATE = "{{ effort or '' }}{{ messages[-1].content }}{% if tools %}{{ tools | tojson }}{% endif %}"
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
USER = [{"role": "user", "content": "äbc"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def only_message(prompt):
    """What the model says: the prompt up to the tools."""
    return prompt.partition('[{"type"')[0]


DIGITS = {"structured_outputs": {"regex": "[0-9]+"}}


@pytest.fixture(scope="module")
def served():
    form = ChatFormat.of(ChatTemplate(TEMPLATE), "qwen3", "hermes")
    with scripted(only_message, chat=form) as (url, engine):
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0), engine, url


def ask(client, content, stream=False, **options):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], stream=stream, **options)


def joined(chunks):
    """The message of a stream, its finish reason, and log probabilities."""
    message, reasons, logprobs = {}, [], []
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.to_dict()
            for name, value in delta.items():
                message[name] = message[name] + value if name in message else value
            reasons.append(choice.finish_reason)
            logprobs += choice.logprobs.content if choice.logprobs else []
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return message, reasons[-1], logprobs


def test_a_chat_is_continued(client):
    answer = ask(client, "äbc", max_completion_tokens=3)
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.to_dict() == {"role": "assistant", "content": "äb"}
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 3)


def test_a_stream_is_the_answer_in_pieces(client):
    chunks = list(ask(client, "äbc", stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(chunks) == ({"role": "assistant", "content": "äbc"}, "stop", [])
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 4)


THOUGHT = f"<think>\nhm\n</think>\n\nI call.\n{CALL}\n{CALL}"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_and_calls_are_told_apart(client, stream):
    answer = ask(client, THOUGHT, stream, tools=[TOOL])
    if stream:
        message, reason, _ = joined(answer)
    else:
        message, reason = answer.choices[0].message.to_dict(), answer.choices[0].finish_reason
    calls = message.pop("tool_calls")
    if stream:
        # A call begins with its id and its name; its arguments come as they are written.
        first = [call for call in calls if "id" in call]
        assert {call["function"]["name"] for call in first} == {"f"}
        assert len(calls) > len(first) == 2
        for call in first:
            call["function"]["arguments"] = "".join(c["function"]["arguments"] for c in calls if c["index"] == call["index"])
        calls = first
    assert message == {"role": "assistant", "reasoning_content": "hm", "content": "I call."}
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    assert [call.get("index") for call in calls] == ([0, 1] if stream else [None, None])
    assert reason == "tool_calls"


def test_what_is_not_asked_for_is_not_parsed(client, served):
    said = ask(client, THOUGHT, tools=[TOOL], tool_choice="none").choices[0]
    assert (said.message.content, said.message.tool_calls, said.finish_reason) == (f"I call.\n{CALL}\n{CALL}", None, "stop")
    assert byte_codec().decode(served[1].requests[-1].prompt) == THOUGHT
    said = ask(client, THOUGHT, tools=[TOOL], extra_body={"separate_reasoning": False}).choices[0]
    assert said.message.content == "<think>\nhm\n</think>\n\nI call."
    assert len(said.message.tool_calls) == 2


def test_the_last_message_is_continued():
    form = ChatFormat(ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}!{% endif %}"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with scripted(chat=form) as (url, _):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

        def said(**extra):
            return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra).choices[0].message.content

        assert said() == "<a><b>!"
        assert said(add_generation_prompt=False) == "<a><b>"
        assert said(continue_final_message=True) == "<a><b"
        with pytest.raises(openai.BadRequestError, match="both true"):
            said(continue_final_message=True, add_generation_prompt=True)


def test_without_a_template_the_error_says_how_to_give_one():
    with scripted() as (url, _):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="--chat-template FILE") as caught:
            ask(client, "a")
    assert caught.value.code == "chat_template_missing"


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'robot'; legal is 'system', 'developer', 'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "image"),
        ({"messages": [{"role": "user", "content": "a", "extra": 1}]}, "messages[0].extra", "not a field"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function", "missing"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "max_tokens is 1"),
        ({"max_completion_tokens": 9999}, "max_completion_tokens", "4096"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice", "'g', and tools are ['f']"),
        ({"presence_penalty": 2.5}, "presence_penalty", "2.5; legal is a number from -2.0 to 2.0"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", "legal is a number from 0.01 to 100.0"),
        ({"logit_bias": {"1": 200}}, "logit_bias", "token 1 is 200; legal is a number from -100.0 to 100.0"),
        ({"response_format": {"type": "json_object"}, "extra_body": DIGITS}, "structured_outputs", "one of"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "no such setting"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs", "'messages'"),
        ({"extra_body": {"temprature": 3}}, "temprature", "has no field 'temprature'; did you mean temperature?"),
        ({"temperature": 1000}, "temperature", "0.0 to 100.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(client, options, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": USER, **options})
    message = caught.value.message
    assert words in message
    assert caught.value.param.startswith(param)
    assert len(message) < 1200


def test_neutral_values_are_no_error(client):
    neutral = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "tools": [],
        "parallel_tool_calls": True, "metadata": {}, "store": False, "user": "me", "service_tier": "auto", "top_logprobs": 0,
    }  # fmt: skip
    extra = {"repetition_penalty": 1.0, "min_tokens": 0, "length_penalty": 1, "chat_template_kwargs": {}, "suffix": None}
    extra.pop("suffix")
    assert ask(client, "ab", **neutral, extra_body=extra).choices[0].message.content == "ab"


def test_langchain_chats(served):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="tiny", base_url=served[2], api_key="none", max_retries=0)
    assert chat.invoke("äbc").content == "äbc"
    assert "".join(chunk.content for chunk in chat.stream("äbc")) == "äbc"
    called = chat.bind_tools([TOOL]).invoke(CALL)
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("f", {"a": 1})]


@pytest.mark.parametrize("special", [False, True])
def test_marks_may_be_special_tokens(special):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    codec, form = TextTokenizer(tokenizer), ChatFormat.of(ChatTemplate(TEMPLATE), "qwen3", "hermes")
    with scripted(only_message, chat=form, codec=codec, model=replace(MODEL, vocab_size=300)) as (url, _):
        choice = ask(openai.OpenAI(base_url=url, api_key="none", max_retries=0), THOUGHT, tools=[TOOL]).choices[0]
    assert (choice.message.content, len(choice.message.tool_calls)) == ("I call.", 2)


def test_priorities_and_timeouts_reach_the_engine_from_every_endpoint(served):
    client, engine, url = served
    extra = {"priority": 7, "timeout_ms": 5000}
    client.completions.create(model="tiny", prompt="ab", extra_body=extra)
    client.chat.completions.create(model="tiny", messages=USER, extra_body=extra)
    client.responses.create(model="tiny", input="ab", extra_body=extra)
    with urllib.request.urlopen(
        urllib.request.Request(
            url.removesuffix("/v1") + "/generate", json.dumps({"text": "ab", **extra}).encode(), {"Content-Type": "application/json"}
        )
    ) as answer:
        assert answer.status == 200
    assert [(request.priority, request.timeout_ms) for request in engine.requests[-4:]] == [(7, 5000)] * 4
    # All from one address.
    assert len({request.tenant for request in engine.requests}) == 1
    assert engine.requests[-1].tenant


FORCED = [
    ({"tools": [TOOL], "tool_choice": "required"}, CALL, '{"a": 1}'),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, CALL, "I call"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, f"I call.{CALL}", f"{CALL}\n{CALL}"),
    ({"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]}, f"I call.{CALL}", CALL.replace("1", '"x"')),
    ({"response_format": {"type": "json_object"}}, '{"a": 1}', "text"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, CALL, "text"),
]


@pytest.mark.parametrize("kind", [SPELT, TEXT, SPECIAL])
@pytest.mark.parametrize(("options", "legal", "illegal"), FORCED)
def test_what_must_be_is_a_grammar_that_begins_behind_reasoning(kind, options, legal, illegal):
    """Whatever marks are to the model's tokenizer."""
    known = vocabulary(kind)
    template = "{{ messages[-1].content }}{% if enable_thinking is not false %}<think>{% endif %}"
    form, codec = ChatFormat.of(ChatTemplate(template), "qwen3", "hermes"), TextTokenizer(known.tokenizer)
    model = replace(MODEL, vocab_size=known.size, eos_token_ids=frozenset({EOS}))
    with scripted(lambda prompt: "hm</think>" + legal, chat=form, codec=codec, model=model) as (url, engine):
        said = ask(openai.OpenAI(base_url=url, api_key="none", max_retries=0), "x", **options).choices[0].message
        constraint = engine.requests[-1].constraint
        assert said.reasoning_content == "hm"
        assert bool(said.tool_calls) == ("<tool_call>" in legal)

    assert known.follows(constraint, f"it is <{{ so\n</think>\n\n{legal}")
    assert not known.follows(constraint, f"it is <{{ so\n</think>\n\n{illegal}")
