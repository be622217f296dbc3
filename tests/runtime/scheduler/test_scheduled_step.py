"""runtime/scheduler/scheduled_step.py: what a step knows of its rows."""

from __future__ import annotations

from dataclasses import replace

from support.scheduling import all_decode, policy, request

from npucompile.runtime.request import Sampling
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.scheduled_step import GroupStep, ScheduledRequest, ScheduledStep

RULES = policy(decode=(4,), prefill=((4, 8),), pages=200, requests=5, page_size=2, length=60, drafts=2)


def test_rows_with_rules_are_those_of_requests_that_are_not_plain() -> None:
    state = all_decode(RULES, *(request(name, max_tokens=40) for name in "ab"))
    step = schedule(state)
    assert step is not None
    assert list(step.rows_with_rules) == []
    first, second = state.groups[0].running
    biased = replace(first.request, sampling=Sampling(logit_bias=((1, 2.0),)))
    rows = (ScheduledRequest(first._replace(request=biased), 9, 1), ScheduledRequest(second, 9, 1))
    assert list(ScheduledStep(step.bucket, (GroupStep(rows), GroupStep())).rows_with_rules) == [rows[0]]
