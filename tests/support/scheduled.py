"""Requests that the real scheduler serves under a clock that only steps move."""

from __future__ import annotations

from npucompile.runtime.request import FinishEvent, Request, TokenEvent
from npucompile.runtime.scheduler.advance import commit, launch, submit
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.request_state import RequestState
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.scheduled_step import ScheduledStep
from npucompile.runtime.scheduler.state import GroupState, SchedulerState
from npucompile.runtime.step_outputs import SampledTokens
from npucompile.tools.plan.system import Workload


def served(work: Workload, policy: Policy, groups: int, tokens: int, step_s) -> list[list[float]]:
    """Sent, first and last token of each request, in seconds.

    Args:
        tokens: of each row of a decode step.
        step_s: seconds of a `ScheduledStep`; called once for each, in order.
    """
    state, now, sent = SchedulerState(policy, (GroupState(),) * groups), 0.0, 0
    live, first, end, at = 0, {}, {}, {}
    while len(end) < work.requests:
        while sent < work.requests and live < work.concurrency and (not work.arrivals or work.arrivals[sent] <= now):
            prompt = Request(str(sent), (1,) * work.inputs[sent], work.outputs[sent])
            state = submit(state, RequestState(prompt, sent, now))
            at[sent], sent, live = now, sent + 1, live + 1
        step = schedule(state)
        if step is None:
            now = work.arrivals[sent]
            continue
        state = launch(state, step, now)
        took = step_s(step)
        now += took
        results = []
        for part in step.groups:
            rows = [SampledTokens((7,) * (tokens if row.state.decoding else 1) if row.samples else ()) for row in part.rows]
            results.append(rows)
        state, events = commit(state, step, results, now, 1e3 * took if policy.measured else None)
        for event in events:
            index = int(event.request_id if hasattr(event, "request_id") else event.id)
            if isinstance(event, TokenEvent):
                first.setdefault(index, now)
            elif isinstance(event, FinishEvent):
                end[index], live = now, live - 1
    return [[column[i] for i in range(work.requests)] for column in (at, first, end)]


def live_rows(step: ScheduledStep) -> int:
    """Rows of the group that has most of them."""
    return max(len(part.rows) for part in step.groups)
