"""server/requests/create_body.py: which bodies are accepted, and which are refused and by what name."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from openai.types.responses import ResponseIncludable

from npucompile.runtime.request import Sampling
from npucompile.server.requests.bounds import MAX_COMPLETIONS, MAX_SEED, MAX_TOP_LOGPROBS
from npucompile.server.requests.create_body import LOGPROBS, ChatMessage, Conversation
from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.tool_fields import ToolUse
from npucompile.server.socket.messages import parse


def create(**fields):
    return parse({"type": "response.create", **fields})


# --- accepted ---


def test_the_least_message_takes_the_defaults():
    body = create(input="hello")
    assert (body.prompt, body.sampling, body.logprobs, body.format, body.use) == ("hello", Sampling(), None, None, ToolUse())


def test_every_field_arrives():
    sampled = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": MAX_SEED}
    others = {
        "model": "tiny", "stream_id": "a", "max_output_tokens": 7, "stop": ["x", "yz"], "ignore_eos": True, "n": MAX_COMPLETIONS,
        "speculative_tokens": 3, "cache_salt": "ours", "skip_reading_prefix_cache": True, "stream": True, "store": False,
    }  # fmt: skip
    body = create(input="hello", include=[LOGPROBS], top_logprobs=MAX_TOP_LOGPROBS, **sampled, **others)
    assert (body.sampling, body.logprobs) == (Sampling(**sampled), MAX_TOP_LOGPROBS)
    assert {name: getattr(body.fields, name) for name in others} == others


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"include": []}, None),
        ({"include": None, "top_logprobs": None}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 5}, 5),
        ({"top_logprobs": 5}, 5),
        ({"top_logprobs": 0}, 0),
        ({"include": [], "top_logprobs": 0}, 0),
    ],
)
def test_log_probabilities_are_asked_for_in_two_ways(fields, logprobs):
    assert create(input="x", **fields).logprobs == logprobs


def test_null_is_absent():
    nulls = dict.fromkeys(["model", "stream_id", "max_output_tokens", "temperature", "seed", "stop", "previous_response_id", "background"])
    nulls |= dict.fromkeys(["n", "include", "top_logprobs", "speculative_tokens"])
    assert create(input="hi", **nulls).fields == create(input="hi").fields


def test_three_kinds_of_prompt():
    assert create(input_token_ids=[1, 2, 3]).prompt == (1, 2, 3)
    assert create(input="").prompt == ""
    messages = [
        {"role": "system", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    assert create(input=messages).prompt == Conversation((ChatMessage("system", "be brief"), ChatMessage("user", "ab")))


def test_a_conversation_goes_on_behind_what_is_kept_of_it():
    kept = create(input=[{"role": "user", "content": "a"}]).items
    for body in (create(input="b", previous_response_id="r"), create(input=[{"role": "user", "content": "b"}], previous_response_id="r")):
        assert body.after(kept).prompt == Conversation((ChatMessage("user", "a"), ChatMessage("user", "b")))
    assert create(previous_response_id="r").after(kept).prompt == Conversation(kept)
    assert create(generate=False, instructions="be brief").prompt == Conversation((), "be brief")


def test_one_stop_string_need_not_be_a_list():
    assert create(input="a", stop="end").fields.stops == create(input="a", stop=["end"]).fields.stops == ("end",)


def test_instructions_come_before_the_input():
    conversation = Conversation((ChatMessage("user", "ab"),), "be brief")
    assert [message["role"] for message in conversation.messages()] == ["system", "user"]
    made = create(input="ab", instructions="be brief", metadata={"k": "v"})
    assert (made.prompt, made.fields.metadata) == (conversation, {"k": "v"})
    assert create(input=[{"role": "user", "content": "ab"}], instructions="be brief").prompt == conversation


def test_instructions_that_say_nothing_are_none():
    assert create(input="ab", instructions="").prompt == "ab"
    assert create(input=[{"role": "user", "content": "ab"}], instructions="").prompt.messages() == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("body", "chars"),
    [({"input": "abc"}, 3), ({"input_token_ids": [1, 2]}, 0), ({"input": [{"role": "user", "content": "ab"}] * 2}, 4)],
)
def test_the_length_of_a_prompt_is_known_before_it_is_tokenized(body, chars):
    assert create(**body).prompt_chars == chars


TOOL = {"type": "function", "name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}


def test_tools_get_the_form_that_templates_know():
    use = create(input="a", tools=[TOOL], tool_choice="required", parallel_tool_calls=False).use
    assert use == ToolUse((CHAT_TOOL,), "required", None, False)


def test_what_says_nothing_is_accepted():
    nothing = {"user": "me", "service_tier": "auto", "max_tool_calls": 3, "truncation": "disabled", "context_management": [], "new": None}
    assert create(input="a", **nothing).prompt == "a"
    assert create(input="a", reasoning={"effort": None, "summary": "auto"}).fields.reasoning.effort is None
    assert create(input="a", reasoning={"effort": "low", "summary": "concise"}).fields.reasoning.effort == "low"
    assert create(input="a", include=[*get_args(ResponseIncludable)], client_metadata={"session": "x"}).logprobs == 0


def test_tools_are_allowed_one_by_one():
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    use = create(input="a", tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=allowed).use
    assert (use.choice, [tool["function"]["name"] for tool in use.offered]) == ("required", ["f"])


# --- refused: fields, code, param, and what the text must name where no other test pins it ---

IDS = {"input": None, "input_token_ids": [1]}
REFUSED = [
    ({"temprature": 1}, "unknown_field", "temprature", "temperature"),
    ({"input": None}, "invalid_field", "input", "no input"),
    ({"input": []}, "invalid_field", "input", "at least one item"),
    ({"input_token_ids": [1]}, "invalid_field", "input", "exactly one"),
    ({"input": 5}, "invalid_field", "input", "string"),
    ({"input": [1, 2]}, "invalid_field", "input[0]", "input_token_ids"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "invalid_field", "input[0].role", "['user']"),
    ({"input": [{"role": "user", "content": 1}]}, "invalid_field", "input[0].content", "1"),
    ({"input": [{"role": "user"}]}, "invalid_field", "input[0].content", "None"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "invalid_image_url", "input[0].content[0].image_url", "data URL"),
    ({"input": [{"role": "user", "content": "x", "name": 1}]}, "unknown_field", "name", "input[0]"),
    ({"input": [{"type": "item_reference"}]}, "invalid_field", "input[0].type", "'reasoning'"),
    *(({"input": None, "input_token_ids": ids}, "invalid_field", "input_token_ids", "integers") for ids in ("12", [1, True], [1.0])),
    ({"stream": False}, "invalid_field", "stream", "websocket"),
    ({"background": True}, "invalid_field", "background", "resumable"),
    ({"generate": False, "n": 2}, "invalid_field", "n", "generate is false"),
    ({"tools": [TOOL], "n": 2}, "invalid_field", "n", "there are tools"),
    ({**IDS, "instructions": "a"}, "invalid_field", "instructions", "input_token_ids"),
    ({**IDS, "previous_response_id": "r"}, "invalid_field", "previous_response_id", "with input"),
    *(({"metadata": value}, "invalid_field", "metadata", "16 strings of up to 512") for value in ({"a": 1}, {"a": "x" * 513}, [])),
    ({"truncation": "auto"}, "unsupported_value", "truncation", 'legal is "disabled", absent'),
    ({"conversation": "conv_1"}, "unsupported_value", "conversation", "legal is absent"),
    ({"include": ["output_text.logprobs"]}, "invalid_field", "include[0]", LOGPROBS),
    ({"tools": [{"type": 1, "name": "f"}]}, "invalid_field", "tools[0].type", "'function'"),
    ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].name", ""),
    ({"tools": [{**TOOL, "x": 1}]}, "unknown_field", "tools[0].x", ""),
    ({"tool_choice": "any"}, "invalid_field", "tool_choice", "required"),
    ({"tool_choice": {"type": "function", "name": "f", "x": 1}}, "unknown_field", "tool_choice.x", ""),
    ({"reasoning": {"effort": 1}}, "invalid_field", "reasoning.effort", "xhigh"),
    ({"reasoning": {"mode": "pro"}}, "unknown_field", "reasoning.mode", ""),
    ({"temperature": float("nan")}, "invalid_field", "temperature", "nan"),
    ({"top_k": -2}, "invalid_field", "top_k", "at least -1"),
    ({"seed": MAX_SEED + 1}, "invalid_field", "seed", str(MAX_SEED)),
    ({"n": 9}, "invalid_field", "n", "at most 8"),
    ({"logprobs": True}, "unknown_field", "logprobs", "top_logprobs"),
    *(
        ({"logit_bias": value}, "invalid_field", "logit_bias", "token ids")
        for value in ({"a": 1}, {"1" * 11: 1}, {"\u00b2": 1}, {"1": True}, [1])
    ),
]
WRONG = {
    "stream_id": ("", 1, "s" * 129), "model": (1, ""), "instructions": (1,), "previous_response_id": ("",), "store": (1,),
    "max_output_tokens": (0, 2.0, True), "temperature": (-1, "hot", float("inf")), "top_p": (0, 1.5), "min_p": (2,), "top_k": (1.5,),
    "seed": (-2,), "stop": ("", ["a"] * 17, "a" * 1025, {"a": 1}), "ignore_eos": (1,), "include": (LOGPROBS,), "stream": (1,),
    "top_logprobs": (21, -1, True), "n": (0, 2.0, False), "cache_salt": ("", "x" * 257), "skip_reading_prefix_cache": (1,),
    "speculative_tokens": (-1, 1.5, False), "tools": ({},), "parallel_tool_calls": (1,), "reasoning": ([],), "chat_template_kwargs": ([],),
    "logit_bias": ({"-1": 1},), "allowed_token_ids": ([],),
}  # fmt: skip
REFUSED += [({name: value}, "invalid_field", name, "legal is") for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("fields", "code", "param", "words"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_refusal_names_the_field_and_the_legal_values(fields, code, param, words):
    with pytest.raises(FieldError) as caught:
        create(**{"input": "x", **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert words in str(caught.value)
