"""runtime/replacing.py: the same as `_replace`, whatever the order of the fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.replacing import replacer
from npucompile.runtime.request import ExecutionRecord


@given(st.permutations(ExecutionRecord._fields), st.integers(1, len(ExecutionRecord._fields)))
def test_it_replaces_what_replace_does(names, count):
    changes = {name: object() for name in names[:count]}
    record = ExecutionRecord(1.0, 2.0, 3.0)
    changed = replacer(ExecutionRecord, *changes)(record, *changes.values())
    assert type(changed) is ExecutionRecord
    assert changed == record._replace(**changes)


def test_a_field_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="not in tuple"):
        replacer(ExecutionRecord, "nothing")
