"""runtime/scheduler/scheduled_step.py: the rows of a batch are those that its requests get one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduling import all_decode, batch_tokens, policy, request

from npucompile.runtime.request import Sampling
from npucompile.runtime.scheduler.advance import commit, launch
from npucompile.runtime.scheduler.decode_batch import DecodeBatch
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.scheduled_step import DecodeRows, GroupStep, ScheduledRequest, ScheduledStep
from npucompile.runtime.scheduler.steady import gathered

RULES = policy(decode=(4,), prefill=((4, 8),), pages=200, requests=5, page_size=2, length=60, drafts=2)


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_of_a_batch(ahead: bool) -> None:
    single = all_decode(RULES, *(request(name, prompt=3 + i, max_tokens=40, speculative_tokens=i) for i, name in enumerate("abc")))
    state = gathered(single)
    for number in range(3):
        step, expected = schedule(state), schedule(single)
        assert step is not None
        assert step == expected
        rows = step.groups[0].rows
        assert isinstance(rows, DecodeRows)
        assert rows.base.tolist() == [row.start for row in rows]
        assert rows.used_pages == sum(row.num_pages for row in rows)
        assert step.groups[0].arrivals == expected.groups[0].arrivals == tuple(row.state.arrival for row in rows)
        state, single = launch(state, step, 0.0), launch(single, expected, 0.0)
        if ahead and number == 0:
            continue
        batch = state.groups[0].running
        assert isinstance(batch, DecodeBatch)
        tokens = batch_tokens(batch, [(1,), (1, 2), (1, 2, 3)])
        single, _ = commit(single, step, [list(tokens)], 0.0)
        state, _ = commit(state, step, [tokens], 0.0)
        assert state == single


def test_rows_with_rules_are_those_of_requests_that_are_not_plain() -> None:
    states = all_decode(RULES, *(request(name, max_tokens=40) for name in "ab")).groups[0].running
    batch_step = schedule(gathered(all_decode(RULES, *(request(name, max_tokens=40) for name in "ab"))))
    assert batch_step is not None
    assert list(batch_step.rows_with_rules) == []
    biased = replace(states[0].request, sampling=Sampling(logit_bias=((1, 2.0),)))
    rows = (ScheduledRequest(states[0]._replace(request=biased), 9, 1), ScheduledRequest(states[1], 9, 1))
    assert list(ScheduledStep(batch_step.bucket, (GroupStep(rows), GroupStep())).rows_with_rules) == [rows[0]]
