"""server/parsers/message.py: reasoning first, calls in the answer only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import written
from support.parsing import Call, joined, pieces_of

from npucompile.server.parsers.call_formats import FORMATS
from npucompile.server.parsers.message import MessageParser
from npucompile.server.parsers.reasoning import Content, Reasoning, ReasoningParser
from npucompile.server.parsers.tool_calls import ToolCallParser
from npucompile.server.requests.items import read_arguments

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
WORDS = ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", "\n", "<", "a"]


def parse(pieces, reasoning=True, tools=True):
    parser = MessageParser(ReasoningParser(False) if reasoning else None, ToolCallParser(FORMATS["hermes"], {}) if tools else None)
    return joined(parser, pieces)


def test_a_message_has_all_three():
    text = f"<think>\nI could call {CALL}\n</think>\n\nI do:\n{CALL}"
    assert parse([text]) == [Reasoning(f"I could call {CALL}"), Content("I do:"), Call("f", {})]
    assert parse([text], tools=False) == [Reasoning(f"I could call {CALL}"), Content(f"I do:\n{CALL}")]
    assert parse([text], reasoning=False, tools=False) == [Content(text)]


@given(words=st.lists(st.sampled_from(WORDS), max_size=10), data=st.data())
def test_pieces_do_not_matter(words, data):
    text = "".join(words)
    assert parse(data.draw(pieces_of(text))) == parse([text])


FIRST = '<tool_call>{{"arguments": {}, "name": "f\\ud83d"}}</tool_call>'
"""A call that is told when it is whole."""


@pytest.mark.parametrize("name", [*FORMATS, "arguments first"])
@pytest.mark.parametrize("schema", [{}, {"properties": {"where": {"type": "object"}}}])
def test_half_a_surrogate_pair_that_a_model_writes_can_be_sent_and_read(name, schema):
    call = written(name, ("f", {"where": {"x": "HALF"}})) if name in FORMATS else FIRST.format('{"where": {"x": "HALF"}}')
    parser = MessageParser(None, ToolCallParser(FORMATS.get(name, FORMATS["hermes"]), {"f": schema}))
    parts = [*parser.push(call.replace("HALF", "\\ud83d")), *parser.finish()]
    sent = [getattr(part, field).encode().decode() for part in parts for field in ("name", "text") if hasattr(part, field)]
    where = read_arguments("".join(sent[1:]))["where"]
    assert (read_arguments(where) if isinstance(where, str) else where) == {"x": "\ufffd"}
