"""server/parsers/json_reader.py: where JSON ends, and numbers that it does not have."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parsing import pieces_of

from npucompile.server.parsers.json_reader import JsonReader, JsonScanner
from npucompile.server.parsers.tool_calls import CallArguments, CallEnd

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


@given(st.data())
def test_numbers_that_json_does_not_have_are_texts_in_json_as_it_is_written(data):
    """Where a word is within a string or cut into pieces too; all else comes as it was written."""
    word = data.draw(st.sampled_from(["NaN", "Infinity", "-Infinity"]))
    text = f'{{"{word}": {word}, "b": [-1, {word}, "a\\" {word}"], "c": {{"d": {word}}}}}'
    reader = JsonReader(re.compile(r"(?P<name>f)"), str, lambda text: pytest.fail(text))
    parts = [part for piece in data.draw(pieces_of(f"f{text}")) for part in reader.push(piece)] + reader.finish()
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert json.loads(arguments, parse_constant=pytest.fail) == json.loads(text, parse_constant=str)
    assert arguments.replace(f'"{word}"', word) == text.replace(f'"{word}"', word)


@pytest.mark.parametrize("cut", range(len('{"a": NaN, "b": tru')))
def test_arguments_that_are_cut_are_sent_up_to_the_cut(cut):
    text = '{"a": NaN, "b": tru'[: cut + 1]
    reader = JsonReader(re.compile(r"(?P<name>f)"), str, lambda text: pytest.fail(text))
    parts = [*reader.push(f"f{text}"), *reader.finish()]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)).replace('"NaN"', "NaN") == text
    assert parts[-1] == CallEnd(whole=False)
