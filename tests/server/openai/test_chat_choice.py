"""server/openai/chat_choice.py: what is held back comes later, and with it its tokens and log probabilities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.texts import RECORD, byte_codec

from npucompile.runtime.request import Logprobs
from npucompile.server.engine.output_stream import CompletionEnd, TextDelta, Usage
from npucompile.server.openai.chat_choice import ChatChoice
from npucompile.server.openai.request_models import ChatRequest
from npucompile.server.parsers.call_formats import FORMATS
from npucompile.server.parsers.message import MessageParser
from npucompile.server.parsers.reasoning import ReasoningParser
from npucompile.server.parsers.tool_calls import ToolCallParser

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
BODY = ChatRequest(messages=[{"role": "user", "content": "a"}], logprobs=True, return_token_ids=True)


def chunks(pieces, reason="stop"):
    """The chunks of a text in pieces, and the whole choice."""
    parser = MessageParser(ReasoningParser(False), ToolCallParser(FORMATS["hermes"], {}))
    choice = ChatChoice(0, parser, BODY, (1,), byte_codec())
    made = []
    for piece in pieces:
        ids = byte_codec().encode(piece)
        made.append(choice.chunk(TextDelta(piece, ids, tuple(Logprobs(-1.0, ()) for _ in ids)), None))
    made.append(choice.chunk(None, CompletionEnd(reason, Usage(1, 1, RECORD))))
    return [chunk for chunk in made if chunk is not None], choice.whole()


@given(
    words=st.lists(st.sampled_from(["<think>", "</think>", CALL, "<tool_", "a", "é", "\n"]), max_size=8),
    data=st.data(),
)
def test_a_stream_adds_up_to_the_whole(words, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if b > a]
    parts, whole = chunks(pieces)
    message = whole["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(part["delta"].get(name) or "" for part in parts) == (message.get(name) or "")
    calls = {}
    for call in (call for part in parts for call in part["delta"].get("tool_calls", [])):
        known = calls.setdefault(call["index"], {"name": call["function"].get("name"), "arguments": ""})
        known["arguments"] += call["function"]["arguments"]
    assert list(calls.values()) == [call["function"] for call in message.get("tool_calls", [])]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"] == list(byte_codec().encode(text))
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    assert ["role" in part["delta"] for part in parts] == [True] + [False] * (len(parts) - 1)


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [(CALL, "stop", "tool_calls"), (CALL, "length", "length"), ("a", "stop", "stop"), ("a", "cancelled", "abort")],
)
def test_a_call_is_why_the_model_stopped(text, reason, expected):
    parts, whole = chunks([text], reason)
    assert parts[-1]["finish_reason"] == whole["finish_reason"] == expected


def test_a_message_of_calls_alone_has_no_content():
    assert chunks([CALL])[1]["message"]["content"] is None
    assert chunks([""])[1]["message"]["content"] == ""
