"""Requests that the real scheduler serves under a clock that only steps move."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from npucompile.runtime.request import FinishEvent, Request, TokenEvent
from npucompile.runtime.scheduler.advance import commit, launch, submit
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.request_state import RequestState
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.scheduled_step import ScheduledStep
from npucompile.runtime.scheduler.state import GroupState, SchedulerState
from npucompile.runtime.scheduler.step_times import StepTimes
from npucompile.runtime.step_outputs import SampledTokens
from npucompile.tools.advisor.plan.system import Workload


class Run(NamedTuple):
    """Times in seconds: of each request when it was sent and its first and last token, of all tokens the time since the one before,
    and (kind, live rows of the largest group, start, end) of each step.
    """

    sent: list[float]
    first: list[float]
    end: list[float]
    gaps: list[float]
    steps: list[tuple[str, int, float, float]]


def served(work: Workload, policy: Policy, groups: int, tokens: int, step_s, times: StepTimes | None = None) -> Run:
    """The requests of a workload.

    Args:
        tokens: of each row of a decode step.
        step_s: seconds of a `ScheduledStep`; called once for each, in order.
        times: of a policy that goes by them, which stay as they are; None measures them.
    """
    state, now, sent = SchedulerState(policy, (GroupState(),) * groups), 0.0, 0
    state = state if times is None else replace(state, times=times)
    live, first, end, at, last, gaps, steps = 0, {}, {}, {}, {}, [], []
    while len(end) < work.requests:
        while sent < work.requests and live < work.concurrency and (not work.arrivals or work.arrivals[sent] <= now):
            priority = work.priorities[sent] if work.priorities else 0
            prompt = Request(str(sent), (1,) * work.inputs[sent], work.outputs[sent], priority=priority)
            state = submit(state, RequestState(prompt, sent, now))
            at[sent], sent, live = now, sent + 1, live + 1
        step = schedule(state)
        if step is None:
            now = work.arrivals[sent]
            continue
        state = launch(state, step, now)
        took = step_s(step)
        steps.append((step.bucket.kind, live_rows(step), now, now + took))
        now += took
        results = []
        for part in step.groups:
            rows = [SampledTokens((7,) * (tokens if row.state.decoding else 1) if row.samples else ()) for row in part.rows]
            results.append(rows)
        state, events = commit(state, step, results, now, 1e3 * took if policy.measured and times is None else None)
        for event in events:
            index = int(event.request_id if hasattr(event, "request_id") else event.id)
            if isinstance(event, TokenEvent):
                gaps += [now - last[index]] if index in last else []
                first.setdefault(index, now)
                last[index] = now
            elif isinstance(event, FinishEvent):
                end[index], live = now, live - 1
    return Run(*([column[i] for i in range(work.requests)] for column in (at, first, end)), gaps, steps)


def live_rows(step: ScheduledStep) -> int:
    """Rows of the group that has most of them."""
    return max(len(part.rows) for part in step.groups)
