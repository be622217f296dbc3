"""runtime/scheduler/token_log.py: a log is the tuple it stands for, whatever was appended to others, and appending copies nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.request import DecodedRow
from npucompile.runtime.scheduler.token_log import TokenLog

TOKENS = st.lists(st.integers(0, 9), max_size=5).map(tuple)


@given(TOKENS, st.lists(st.tuples(st.integers(0, 20), TOKENS), max_size=20), st.data())
def test_every_state_stays_what_it_was(first, appends, data):
    states = [(TokenLog(first), first)]
    for chosen, tokens in appends:
        log, expected = states[chosen % len(states)]
        states.append((log.extended(tokens), expected + tokens))
    for log, expected in states:
        assert log == expected
        assert tuple(log) == expected
        assert (len(log), hash(log)) == (len(expected), hash(expected))
        part = data.draw(st.slices(len(expected) + 3))
        assert log[part] == expected[part]
        assert [log[i] for i in range(-len(expected), len(expected))] == [*expected, *expected]
        for outside in (len(expected), -len(expected) - 1):
            with pytest.raises(IndexError):
                log[outside]


def test_rows_of_a_state_are_those_appended_to_it():
    first, second = (DecodedRow("d", 0, 3, accepted) for accepted in (1, 2))
    log = TokenLog((1,))
    longer = log.extended((2, 3), first)
    other = log.extended((4, 5, 6), second)
    assert (log.rows, longer.rows, other.rows, longer.extended((7,)).rows) == ([], [first], [second], [first])
    # A row whose tokens are none of the output is told, too.
    assert (log.extended((), first).rows, log.rows, len(log)) == ([first], [], 1)


def test_appending_at_the_end_shares_the_list():
    log = TokenLog()
    lists = set()
    for i in range(1000):
        log = log.extended((i,))
        lists.add(id(log._items))
    assert len(lists) == 1
    assert log == tuple(range(1000))
    # A tuple of as many would have been made a thousand times.
    assert log.extended((1,))._items is log._items
    assert log.extended((2,)) == (*range(1000), 2)
