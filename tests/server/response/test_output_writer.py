"""server/response/output_writer.py: what a parser finds are items whose events add up to them, as openai's types have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter
from support.parsing import pieces_of

from npucompile.server.parsers.call_formats import FORMATS
from npucompile.server.parsers.message import MessageParser
from npucompile.server.parsers.reasoning import ReasoningParser
from npucompile.server.parsers.tool_calls import ToolCallParser
from npucompile.server.requests.items import CallItem, ChatMessage
from npucompile.server.requests.items import ReasoningItem as ReasoningInput
from npucompile.server.response.output_writer import PartsWriter

EVENT, ITEM = TypeAdapter(ResponseStreamEvent), TypeAdapter(ResponseOutputItem)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
WORDS = ["<think>", "</think>", CALL, '<tool_call>{"name": "g", "arguments": {"b', "é", "\n", "b", "<tool_"]


def writer():
    return PartsWriter("1", MessageParser(ReasoningParser(True), ToolCallParser(FORMATS["hermes"], {})))


def written(pieces, status="completed"):
    """A writer and its events; a token is a character."""
    made, events = writer(), []
    for piece in pieces:
        ids = [ord(character) for character in piece]
        logprobs = [{"token": c, "token_id": ord(c), "logprob": -1.0, "bytes": [], "top_logprobs": []} for c in piece]
        events += made.write(tuple(piece), ids, logprobs)
    return made, [{"sequence_number": 0, **event} for event in events + made.close(status)]


def test_reasoning_text_and_calls_are_items_in_their_order():
    made, events = written([f"hm</think>\n\nI call.\n{CALL}\n{CALL}"])
    objects = made.objects()
    assert [item["type"] for item in objects] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["id"] for item in objects] == ["rs_1", "msg_1_1", "fc_1_2", "fc_1_3"]
    assert objects[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [item["arguments"] for item in objects[2:]] == ['{"a": "x"}'] * 2
    assert len({item["call_id"] for item in objects[2:]}) == 2
    first, second = objects[2:]
    assert made.items() == (
        ReasoningInput("hm"),
        ChatMessage("assistant", "I call."),
        CallItem(first["call_id"], "f", '{"a": "x"}'),
        CallItem(second["call_id"], "f", '{"a": "x"}'),
    )
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"] * 2,
    ]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS), max_size=8), st.sampled_from(["completed", "incomplete", "cancelled"]), st.data())
def test_events_add_up_to_the_items_however_the_text_is_cut(words, status, data):
    text = "".join(words)
    made, events = written(data.draw(pieces_of(text)), status)
    open_item, items = None, []
    for event in events:
        EVENT.validate_python(event)
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert open_item is None
                assert event["output_index"] == len(items)
                open_item = {"text": "", "type": event["item"]["type"]}
            case "output_item.done":
                ITEM.validate_python(event["item"])
                held = event["item"]
                said = held["arguments"] if held["type"] == "function_call" else "".join(part["text"] for part in held["content"])
                assert (open_item["type"], open_item["text"]) == (held["type"], said)
                items.append(held)
                open_item = None
            case kind if kind.endswith(".delta"):
                assert event["output_index"] == len(items)
                open_item["text"] += event["delta"]
    assert open_item is None
    assert items == made.objects()
    assert [item["status"] for item in items[:-1]] == ["completed"] * (len(items) - 1) if items else True
    tokens = [token for event in events for token in event.get("token_ids", [])]
    assert tokens == [ord(character) for character in text][: len(tokens)]
    # A token whose text goes on into a later item has its entry in the item that it begins in.
    entries = ""
    for item in items:
        if item["type"] == "message":
            said = "".join(part["text"] for part in item["content"])
            entries += "".join(entry["token"] for part in item["content"] for entry in part["logprobs"])
            assert said in entries
    assert len(items) == len(written([text], status)[0].objects())
    # Each character is a token, however many come at once.
    assert made.reasoning_tokens == written(list(text), status)[0].reasoning_tokens


@pytest.mark.parametrize("status", ["incomplete", "completed"])
def test_a_call_that_was_cut_is_incomplete_however_the_completion_ended_and_is_input_as_it_is(status):
    made, _ = written(['</think><tool_call>{"name": "g", "arguments": {"b'], status)
    (call,) = made.objects()
    assert (call["arguments"], call["status"]) == ('{"b', "incomplete")
    assert made.items() == (CallItem(call["call_id"], "g", '{"b'),)


def test_an_empty_answer_is_a_message():
    made, events = written([])
    assert [item["type"] for item in made.objects()] == ["message"]
    assert events[0]["type"] == "response.output_item.added"
    assert written([], "cancelled")[0].objects() == []


def test_the_reasoning_is_counted():
    for pieces in (["hm", "</think>", "ab"], ["hm</think>ab"]):
        assert written(pieces)[0].reasoning_tokens == len("hm</think>")
