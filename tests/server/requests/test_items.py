"""server/requests/items.py: items of a conversation as openai's types write them, and the messages that they become."""

from __future__ import annotations

from typing import get_args

import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseInputItem, ResponseReasoningItem

from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.items import (
    LEFT_OUT,
    CallItem,
    CallOutput,
    ChatMessage,
    ReasoningItem,
    read_items,
    size_bytes,
    template_messages,
)
from npucompile.server.requests.left_out import LeftOut

CALL = ResponseFunctionToolCall(type="function_call", call_id="c1", name="f", arguments='{"a": 1}', id="fc_1", status="completed").to_dict()
THOUGHT = ResponseReasoningItem(
    type="reasoning", id="rs_1", summary=[], content=[{"type": "reasoning_text", "text": "hm"}], encrypted_content=None
).to_dict()
USER = {"role": "user", "content": "ä"}
ANSWER = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [{"type": "output_text", "text": "b"}]}
CUSTOM = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'a"\n', "id": "ctc_1", "status": "completed"}
CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}
SPACED = {**CALL, "namespace": "mcp__notes"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "12"}]}
FUNCTION = {"name": "f", "arguments": {"a": 1}}


def test_each_kind_is_read():
    items = read_items([USER, THOUGHT, ANSWER, CALL, RESULT])
    assert items == (
        ChatMessage("user", "ä"),
        ReasoningItem("hm"),
        ChatMessage("assistant", "b"),
        CallItem("c1", "f", '{"a": 1}'),
        CallOutput("c1", "12"),
    )
    assert size_bytes(items) - size_bytes(()) == 5 * 128 + len("ähmb12".encode()) + len('{"a": 1}')


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [USER, THOUGHT, ANSWER, CALL, RESULT],
            [
                USER,
                {
                    "role": "assistant",
                    "content": "b",
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "12"},
            ],
        ),
        ([ANSWER, ANSWER], [{"role": "assistant", "content": "b"}] * 2),
        ([RESULT], [{"role": "tool", "tool_call_id": "c1", "content": "12"}]),
        (
            [CALL, {**CALL, "call_id": "c2"}, ANSWER],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": f"c{i}", "type": "function", "function": FUNCTION} for i in (1, 2)],
                },
                {"role": "assistant", "content": "b"},
            ],
        ),
        (
            [THOUGHT, THOUGHT],
            [{"role": "assistant", "content": "", "reasoning_content": "hm"}] * 2,
        ),
    ],
)
def test_a_turn_of_the_assistant_is_one_message(items, messages):
    assert template_messages(read_items(items)) == messages


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        ({"type": "item_reference", "id": "x"}, "input[0].type", "function_call_output"),
        ({"type": []}, "input[0].type", "legal are"),
        ({**CALL, "arguments": {}}, "input[0].arguments", "JSON object"),
        ({**CALL, "call_id": None}, "input[0].call_id", "1 to 256"),
        ({**CALL, "name": ""}, "input[0].name", "1 to 256"),
        ({**RESULT, "output": 1}, "input[0].output", "list of parts"),
        ({**THOUGHT, "content": [{"type": "input_text", "text": ""}]}, "input[0].content[0]", "reasoning_text"),
        ({**THOUGHT, "encrypted": "x"}, "encrypted", "no field"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[0].type", "function_call_output"),
        ({**CUSTOM, "input": {}}, "input[0].input", "a string"),
        ({"type": "additional_tools", "tools": [{}]}, "input[0].tools[0].type", "'function'"),
    ],
)
def test_what_is_no_item_is_refused_by_name(item, param, words):
    with pytest.raises(FieldError) as caught:
        read_items([item])
    assert caught.value.param == param
    assert words in str(caught.value)


def test_half_a_surrogate_pair_in_arguments_goes_on_as_the_character_for_what_is_none():
    (message,) = template_messages(read_items([{**CALL, "arguments": r'{"a\udc00": ["\ud83d", "\ud83d\ude42é"]}'}]))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a\ufffd": ["\ufffd", "🙂é"]}


def test_items_bring_no_more_tools_than_a_request_may_have():
    with pytest.raises(FieldError, match="bring 2048 tools; legal are at most 1024") as caught:
        read_items([{"type": "additional_tools", "tools": [{"type": "function", "name": "f"}] * 512}] * 4)
    assert caught.value.param == "input"


CONTENT_ELSEWHERE = ("item_reference", "compaction", "compaction_trigger", "configuration_update")
"""What stands for parts of a conversation that are not here: without it the answer would be to another one."""


def models(union):
    """The classes of openai's union of items."""
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(union)[0]) if "type" in kind.model_fields}


VALUES = {"role": "user", "content": "a", "summary": [], "tools": [], "name": "f", "arguments": "{}", "input": "a", "output": "a"}


def test_every_item_that_openai_writes_is_read_or_left_out_by_name_with_all_its_fields():
    for kind, model in models(ResponseInputItem).items():
        if not isinstance(kind, str) or kind in CONTENT_ELSEWHERE:
            continue
        values = {field.alias or name: VALUES.get(name, f"of {name}") for name, field in model.model_fields.items()}
        (item,) = read_items([values | {"type": kind} | ({"content": []} if kind == "reasoning" else {})])
        assert isinstance(item, LeftOut) == (kind in LEFT_OUT or kind == "reasoning"), kind


def test_a_refusal_is_what_the_assistant_said():
    (item,) = read_items([{**ANSWER, "content": [{"type": "refusal", "refusal": "no"}]}])
    assert item == ChatMessage("assistant", "no")


@pytest.mark.parametrize("text", ['{"a": "b', "[" * 10**5, " ", "[1]", '"a"'])
def test_arguments_that_are_no_json_are_text(text):
    (message,) = template_messages(read_items([{**CALL, "arguments": text}]))
    assert message["tool_calls"][0]["function"]["arguments"] == text
