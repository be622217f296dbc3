"""server/parsers/custom_input.py: the input of a custom tool's call, however its arguments are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parsing import pieces_of

from npucompile.server.parsers.custom_input import CustomInput

WRITTEN = st.lists(
    st.sampled_from(["a", "\n", "é", "\\n", "\\\\", '\\"', "\\u00e9", "\\ud83d", "\\ude42", "\\u", "\\q", '"', "}", "{", " "]), max_size=8
).map("".join)


def read(pieces):
    reader = CustomInput()
    return "".join(map(reader.push, pieces)) + reader.finish()


@given(text=st.text(), ascii_only=st.booleans(), data=st.data())
def test_the_one_text_is_the_input(text, ascii_only, data):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    expected = text.encode("utf-8", "replace").decode() if text.isprintable() else text
    assert read(data.draw(pieces_of(arguments))) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "*** Begin\\nPatch', "*** Begin\nPatch"),
        ('{ "input" :"a\\u00e9\\ud83d\\ude42"}', "aé🙂"),
        ('{"input": "a\\ud83db\\ud83d\\ud83d\\ude42"}', "a\ufffdb\ufffd🙂"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\qb"}', "a\\qb"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ("a patch", "a patch"),
        ("{}", "{}"),
        ("", ""),
    ],
)
def test_what_is_cut_or_something_else_is_not_lost(arguments, expected):
    assert read([arguments]) == expected


@given(text=WRITTEN, data=st.data())
def test_pieces_do_not_matter(text, data):
    arguments = f'{{"input": "{text}'
    assert read(data.draw(pieces_of(arguments))) == read([arguments])
