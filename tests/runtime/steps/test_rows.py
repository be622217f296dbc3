"""runtime/steps/rows.py: every kind of steps has rows, with what its inputs are filled from."""

from __future__ import annotations

from operator import attrgetter

import pytest
from support import toy_device

from npucompile.graphs.steps.table import STEP_KINDS
from npucompile.runtime.steps.rows import ROWS, DecodeRow, PrefillRow, SegmentRow

EXAMPLES = {
    "prefill": PrefillRow((5, 6, 7), 0, (1,), 3, 1),
    "decode": DecodeRow(1, 2, (1,), (1,)),
    "encode": SegmentRow(toy_device.picture(0, 1, 1, 0), (1,)),
}


@pytest.mark.parametrize("name", STEP_KINDS)
def test_rows_have_what_the_inputs_of_their_kind_are_filled_from(name: str) -> None:
    # Kinds whose rows are chunks have the same.
    row, fields = EXAMPLES.get(name, EXAMPLES["prefill"]), STEP_KINDS[name].inputs
    assert type(row) is ROWS[name]
    for field in fields:
        if field.row:
            attrgetter(field.row.removeprefix("*"))(row)


def test_a_chunk_starts_from_the_slot_that_it_writes_unless_it_says_another() -> None:
    row = PrefillRow((5, 6, 7), 0, (1,), 3, 1)
    assert (row.length, row.slot_read, row._replace(start_slot=9).slot_read) == (3, 3, 9)
