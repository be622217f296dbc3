"""server/parsers/tool_calls.py: the frame of all formats: text, calls, marks, and what is no call."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parsing import Call, joined, pieces_of

from npucompile.server.parsers.json_reader import JsonReader
from npucompile.server.parsers.tool_calls import CallArguments, CallBegin, CallEnd, CallFormat, ToolCallParser


class Colon:
    """`NAME:JSON`, known at its end."""

    inside = failed = False
    rest = closing = ""

    def __init__(self, tools):
        self.tools, self.text = tools, ""

    def push(self, text):
        self.text += text
        return []

    def finish(self):
        name, _, arguments = self.text.partition(":")
        json.loads(arguments)
        return [CallBegin(f"{name}{self.tools.get(name, '')}"), CallArguments(arguments), CallEnd()]


FORM = CallFormat("<c>", "</c>", Colon, before="<all>", after="</all>")
JSON = CallFormat("<c>", "</c>", lambda _: JsonReader(re.compile(r"(?P<name>f?)(?=\{)"), lambda _: "f", lambda _: json.loads("")))
WORDS = ["<c>", "</c>", "<all>", "</all>", "<", "</", "a:1", "b:{}", '{"x": "', '"}', "\\", '"', " ", "\n", "t"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("only text \n", ["only text \n"]),
        ("<c>a:1</c>", [Call("a!", 1)]),
        ("so:\n<all>\n<c>a:1</c>\n<c>b:2</c></all>\n", ["so:", Call("a!", 1), Call("b", 2)]),
        ("<c>a:1</c> then\n", [Call("a!", 1), "then\n"]),
        ("<c>a:nothing</c> x", ["<c>a:nothing</c> x"]),
        ("x <c>a:1", ["x<c>a:1"]),
        ("x <c", ["x <c"]),
        ("", []),
    ],
)
def test_a_text_has_calls_and_text_around_them(text, expected):
    assert joined(ToolCallParser(FORM, {"a": "!"}), [text]) == expected


def test_a_mark_in_an_argument_is_part_of_it():
    text = '<c>{"x": "</c> \\" </c>"}</c>'
    assert joined(ToolCallParser(JSON, {}), [text]) == [Call("f", {"x": '</c> " </c>'})]


@pytest.mark.parametrize("form", [FORM, JSON], ids=["marks", "json"])
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), data=st.data())
def test_pieces_do_not_matter(form, words, data):
    text = "".join(words)
    assert joined(ToolCallParser(form, {}), data.draw(pieces_of(text))) == joined(ToolCallParser(form, {}), [text])
