"""server/parsers/tagged_reader.py: what a schema says of a value in tags."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.parsers.schemas import Schemas
from npucompile.server.parsers.tagged_reader import typed


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["integer", "null"]}, "None", "None"),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "1"]}, "1", 1),
        ({"enum": [2, "1"]}, "1", "1"),
        ({"const": True}, "True", True),
        ({"type": "boolean"}, " FALSE ", False),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "x", "x"),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5", 5),
        ({}, '{"a": [1]}', {"a": [1]}),
        ({}, "two words", "two words"),
        (None, "5", 5),
        ({"type": "array"}, "['a', \"it's\", 'b\\'s \\xe4 \"c\"', None, True]", ["a", "it's", 'b\'s ä "c"', None, True]),
        ({"type": "object"}, "{'a': {'b': (1, 2)}}", "{'a': {'b': (1, 2)}}"),
        ({"type": "object"}, "{'a': {'b': [1, 2]}}", {"a": {"b": [1, 2]}}),
        ({"type": "integer"}, "['a']", "['a']"),
    ],
)
def test_a_value_in_tags_is_what_its_schema_allows(schema, text, value):
    read = typed(text, Schemas({}).values(schema))
    assert (read, type(read)) == (value, type(value))


NOT_FINITE = st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])


@given(NOT_FINITE, st.sampled_from(["{}", '{{"a": {}}}', "[1, {}, {}]"]), st.sampled_from(["number", "object", "array", "string"]))
def test_numbers_that_json_does_not_have_are_texts_in_tags(number, around, kind):
    text = json.dumps(typed(around.replace("{{", "{").replace("}}", "}").replace("{}", number), Schemas({}).values({"type": kind})))
    assert json.loads(text, parse_constant=pytest.fail, parse_float=lambda number: pytest.fail(number)) is not None


def test_reading_is_linear_in_what_a_model_writes():
    """Of each kind of quote a hundred thousand: with a search from each of them to the end this takes minutes."""
    for text in ('\\"' * 10**5, "\\'" * 10**5, '["' + "\\'" * 10**5, "'\"" * 10**5):
        assert typed(text, Schemas({}).values({"type": "array"})) == text
