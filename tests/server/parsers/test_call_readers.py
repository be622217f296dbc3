"""server/parsers/call_readers.py: where JSON ends, and what a schema says of a value in tags."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parsing import pieces_of

from npucompile.server.parsers.call_readers import JsonScanner, is_text, resolved, typed, types_of

VALUES = st.recursive(
    st.none() | st.integers() | st.text('ab"\\{}[]', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"{}\\', max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text('a"{}\\', max_size=3), VALUES, max_size=3), st.text('"{}a\\', max_size=5), st.data())
def test_the_end_of_an_object_is_found_in_pieces(value, rest, data):
    text = json.dumps(value)
    scanner, taken = JsonScanner(), 0
    for piece in data.draw(pieces_of(text + rest)):
        if not scanner.done:
            taken += scanner.take(piece)
    assert (taken, scanner.done) == (len(text), True)


@pytest.mark.parametrize(("text", "inside"), [('{"a', True), ('{"a"', False), ('{"a\\"', True), ('{"a\\\\"', False), ("{", False)])
def test_a_string_is_known_to_be_open(text, inside):
    scanner = JsonScanner()
    scanner.take(text)
    assert (scanner.in_string, scanner.done) == (inside, False)


ROOT = {"$defs": {"n": {"type": "integer"}, "m": {"$ref": "#/$defs/n"}}, "properties": {"a": {"$ref": "#/$defs/m"}}}


def test_references_are_followed_within_the_schema():
    assert resolved(ROOT["properties"]["a"], ROOT) == {"type": "integer"}
    assert resolved({"$ref": "#/$defs/none"}, ROOT) is None
    assert resolved({"$ref": "http://x"}, ROOT) == {"$ref": "http://x"}
    assert resolved(True, ROOT) is True
    endless = {"$ref": "#/a"}
    assert resolved(endless, {"a": endless}) == endless


@pytest.mark.parametrize(
    ("schema", "types", "text"),
    [
        ({"type": "string"}, {"string"}, True),
        ({"type": ["string", "null"]}, {"string", "null"}, False),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "array"}]}]}, {"string", "array"}, False),
        ({"enum": ["a"]}, set(), True),
        (None, set(), True),
    ],
)
def test_a_schema_says_which_types_a_value_has(schema, types, text):
    assert (types_of(schema), is_text(schema)) == (types, text)
    assert typed("null", schema) == (None if "null" in types else "null")
