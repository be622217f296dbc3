"""runtime/steps/decode_table.py: a decode step's inputs are those of its rows, whatever the slots held before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.rng import random_number
from npucompile.runtime.steps.decode_table import DecodeTable
from npucompile.runtime.steps.pack import pack
from npucompile.runtime.steps.rows import DecodeRow

DRAFTS = 2
LIMITS = Limits(4, 20, 1 + 4 * (DRAFTS + 1), 16, DRAFTS + 1, DRAFTS)

samplings = st.builds(
    Sampling, st.sampled_from([0.0, 0.5]), st.integers(0, 5), st.sampled_from([0.25, 1.0]), st.sampled_from([0.0, 0.5]), st.integers()
)
pages = st.lists(st.integers(1, 19), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(1, 4), samplings, pages, st.booleans(), st.data()), min_size=1, max_size=12), st.sampled_from([2, 3]))
def test_inputs_are_those_of_rows(begun, width):
    table, live = DecodeTable(LIMITS, 2), {}
    for slot, sampling, own, logprobs, data in begun:
        request = Request("r", (1,) * data.draw(st.integers(1, 9)), 9, sampling, logprobs=1 if logprobs else None)
        state_slots, known = data.draw(st.lists(st.integers(1, 12), min_size=3, max_size=3)), data.draw(st.integers(0, len(own)))
        table.begin(slot, request, state_slots, own[:known])
        table.add(slot, known, own[known:])
        own = [*own[:-1], 7]
        table.replace(slot, len(own) - 1, 7)
        base = max(0, 4 * len(own) - DRAFTS - width) if len(own) < 4 else data.draw(st.integers(0, 15))
        index = base + 1 - len(request.prompt)
        uniforms = [random_number(sampling.seed, index + i) for i in range(2 * DRAFTS + 1)] if sampling.temperature else ()
        live[slot] = DecodeRow(slot, base, own, state_slots, data.draw(st.integers(0, width - 1)), sampling, uniforms, logprobs)
    rows = [row for row in live.values() if row.base + min(DRAFTS + width, 16 - row.base) <= 4 * len(row.pages)]
    bucket = Bucket("decode", 5, width)
    given = table.inputs(bucket, [r.request_slot for r in rows], [r.base for r in rows], [r.drafts for r in rows], {})
    expected = pack(bucket, rows, LIMITS, max_logprobs=2)
    assert list(given) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(given[name], array, name)
        assert given[name].dtype == array.dtype


def test_rows_that_do_not_fit_are_refused():
    table = DecodeTable(LIMITS)
    table.begin(1, Request("r", (1,), 9), (1, 2, 3), (5,))
    with pytest.raises(SpecError, match="a row ends at position 5; its 1 pages of 4 tokens end before"):
        table.inputs(Bucket("decode", 1, 3), [1], [0], [0], {})
    table.add(1, 1, (6, 7, 8))
    with pytest.raises(SpecError, match="2 requests for decode-b1-q3, which holds 1"):
        table.inputs(Bucket("decode", 1, 3), [1, 1], [0, 0], [0, 0], {})
    with pytest.raises(SpecError, match="5 pages for one row; the page table holds 4"):
        table.add(1, 4, (9,))
