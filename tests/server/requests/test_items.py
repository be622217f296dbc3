"""server/requests/items.py: items of a conversation as openai's types write them, and the messages that they become."""

from __future__ import annotations

import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.items import CallItem, CallOutput, ChatMessage, ReasoningItem, read_items, size_bytes, template_messages

CALL = ResponseFunctionToolCall(type="function_call", call_id="c1", name="f", arguments='{"a": 1}', id="fc_1", status="completed").to_dict()
THOUGHT = ResponseReasoningItem(
    type="reasoning", id="rs_1", summary=[], content=[{"type": "reasoning_text", "text": "hm"}], encrypted_content=None
).to_dict()
USER = {"role": "user", "content": "ä"}
ANSWER = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [{"type": "output_text", "text": "b"}]}
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
        ({**CALL, "arguments": "[1]"}, "input[0].arguments", "JSON object"),
        ({**CALL, "arguments": {}}, "input[0].arguments", "JSON object"),
        ({**CALL, "call_id": None}, "input[0].call_id", "1 to 256"),
        ({**CALL, "name": ""}, "input[0].name", "1 to 256"),
        ({**RESULT, "output": 1}, "input[0].output", "list of parts"),
        ({**THOUGHT, "content": [{"type": "input_text", "text": ""}]}, "input[0].content[0]", "reasoning_text"),
        ({**THOUGHT, "encrypted_content": "x"}, "encrypted_content", "no field"),
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


@pytest.mark.parametrize("text", ['{"a": "b', "[" * 10**5, " "])
def test_arguments_that_are_no_json_are_text(text):
    (message,) = template_messages(read_items([{**CALL, "arguments": text}]))
    assert message["tool_calls"][0]["function"]["arguments"] == text
