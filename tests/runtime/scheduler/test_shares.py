"""runtime/scheduler/shares.py: shares of a batch are, once somebody looks, what steps of single requests make them."""

from __future__ import annotations

import pytest
from support.scheduling import all_decode, batch_tokens, policy, request

from npucompile.graphs.types import Bucket
from npucompile.runtime.buckets import DecodeRow, pack
from npucompile.runtime.scheduler.advance import commit, computed, launch
from npucompile.runtime.scheduler.batch_inputs import BatchInputs
from npucompile.runtime.scheduler.computed import ComputedBatch
from npucompile.runtime.scheduler.decode_batch import DecodeBatch
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.scheduled_step import DecodeRows
from npucompile.runtime.scheduler.shares import BatchShares, Share
from npucompile.runtime.scheduler.steady import gathered

RULES = policy(decode=(2,), prefill=((2, 8),), pages=200, requests=2, page_size=2, length=40)
BUCKET = Bucket("decode", 2, 1)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_what_is_put_off_is_brought_up_to_date(in_flight: int) -> None:
    state = gathered(all_decode(RULES, *(request(name, max_tokens=30) for name in "ab")))
    step = schedule(state)
    assert step is not None
    rows = step.groups[0].rows
    assert isinstance(rows, DecodeRows)
    packed = [DecodeRow(i + 1, row.start, range(1, 1 + row.num_pages), (i + 1,)) for i, row in enumerate(rows)]
    shares = [Share(in_flight=in_flight) for _ in rows]
    for share, row in zip(shares, packed, strict=True):
        share.table.extend(row.pages)
    batch = BatchShares(BatchInputs(BUCKET, rows, pack(BUCKET, packed, RULES.limits)), shares, [0, 0])
    shares[1].table[0] = 77
    batch.table_changes(1)
    state = launch(state, step, 0.0)
    assert batch.launch(rows)["page_table"][:, 0].tolist() == [1, 77]
    assert [share.in_flight for share in shares] == [in_flight] * 2
    running = state.groups[0].running
    assert isinstance(running, DecodeBatch)
    tokens = batch_tokens(running, [(1,), (2,)])
    (found,) = computed(state, step, [tokens])
    assert isinstance(found, ComputedBatch)
    batch.computed(found)
    state, _ = commit(state, step, [tokens], 0.0)
    batch.settle()
    # The states of the last step are there only while no later one writes over them.
    assert [(share.in_flight, share.last) for share in shares] == [(in_flight, None if in_flight else row) for row in found]
