"""server/parsers/marks.py: earliest marks, and text that nothing behind it can change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.parsers import marks


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [("ab", ["x"], None), ("axbx", ["b", "x"], (1, "x")), ("ab", ["a", "ab"], (0, "ab")), ("", ["x"], None)],
)
def test_the_first_mark_is_the_earliest(text, names, expected):
    assert marks.first(text, names) == expected


@given(text=st.text("ab< ", max_size=8), more=st.text("ab< ", max_size=4))
def test_what_is_certain_holds_no_part_of_a_mark(text, more):
    names = ["<ab", "<<b"]
    if marks.first(text, names) is None:
        sure = marks.certain(text, names)
        found = marks.first(text + more, names)
        assert text[:sure] == text[:sure].rstrip()
        assert found is None or found[0] >= sure
        # Nothing is held back that could be told.
        rest = text[sure:].lstrip()
        assert rest == "" or any(name.startswith(rest) for name in names)
