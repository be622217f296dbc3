"""Scheduler states of small requests, and steps whose rows all sample the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import Event, ExecutionRecord, Request
from npucompile.runtime.scheduler.advance import commit, launch, submit
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.request_state import RequestState
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.scheduled_step import ScheduledStep
from npucompile.runtime.scheduler.state import GroupState, SchedulerState
from npucompile.runtime.step_outputs import SampledTokens

_arrivals = itertools.count()


def policy(
    decode: Iterable[int] = (1, 2, 4),
    prefill: Iterable[int | tuple[int, int]] = (4, 8),
    burst: int = 1,
    pages: int = 9,
    requests: int = 8,
    page_size: int = 2,
    length: int = 8,
    drafts: int = 0,
) -> Policy:
    """Decode buckets by number of rows, prefill buckets by number of tokens of one prompt, or by rows and tokens, and slots for
    `requests` requests of up to `length` tokens."""
    sizes = [(1, size) if isinstance(size, int) else size for size in prefill]
    buckets = (*(Bucket("prefill", rows, tokens) for rows, tokens in sizes), *(Bucket("decode", b, drafts + 1) for b in decode))
    return Policy(Limits(page_size, pages, 1 + requests * (drafts + 1), length, drafts + 1, drafts), buckets, burst)


def request(
    name: str,
    prompt: int = 3,
    max_tokens: int = 4,
    stop: Iterable[int] = (),
    speculative_tokens: int | None = None,
    logprobs: int | None = None,
    priority: int = 0,
    tenant: str = "",
) -> Request:
    """A greedy request whose prompt is 0, 1, 2, ..."""
    return Request(
        name,
        tuple(range(prompt)),
        max_tokens,
        stop_token_ids=frozenset(stop),
        logprobs=logprobs,
        speculative_tokens=speculative_tokens,
        priority=priority,
        tenant=tenant,
    )


def queued(item: Request, drafts: int = 0, submitted_ms: float = 0.0) -> RequestState:
    """A request as the engine submits it, after all others."""
    return RequestState(item, next(_arrivals), submitted_ms, ExecutionRecord(accepted_per_position=(0,) * drafts))


def add(state: SchedulerState, *requests: Request, group: int | None = None) -> SchedulerState:
    """The state with more requests; in one group's queue, or where `submit` puts them."""
    for item in requests:
        new = queued(item, state.policy.limits.drafts)
        if group is None:
            state = submit(state, new)
        else:
            groups = list(state.groups)
            groups[group] = GroupState((*groups[group].waiting, new), groups[group].running)
            state = state_with(state, groups)
    return state


def state_with(state: SchedulerState, groups: Iterable[GroupState], steps_in_flight: int = 0) -> SchedulerState:
    """The state with other requests."""
    return SchedulerState(state.policy, tuple(groups), state.prefill_steps, steps_in_flight, state.num_scheduled)


def fresh(rules: Policy, *requests: Request) -> SchedulerState:
    """One group whose requests are all waiting."""
    return grouped(rules, requests)


def grouped(rules: Policy, *groups: Sequence[Request]) -> SchedulerState:
    """Groups whose requests are all waiting."""
    state = SchedulerState(rules, (GroupState(),) * len(groups))
    for i, requests in enumerate(groups):
        state = add(state, *requests, group=i)
    return state


def sampled(step: ScheduledStep, *tokens: int) -> list[list[SampledTokens | None]]:
    """Results of a step that sampled these tokens for every row; a prefill row that samples gets the first of them."""

    def tokens_of(samples: bool) -> tuple[int, ...]:
        return (tokens if step.bucket.kind == "decode" else tokens[:1]) if samples else ()

    return [[SampledTokens(tokens_of(row.samples), row.num_drafts) for row in part.rows] for part in step.groups]


def run_step(state: SchedulerState, *tokens: int) -> tuple[SchedulerState, ScheduledStep, tuple[Event, ...]]:
    """Schedules, launches and commits one step that samples these tokens for every row."""
    step = schedule(state)
    assert step is not None
    state, events = commit(launch(state, step, 1.0), step, sampled(step, *(tokens or (1,))), 2.0)
    return state, step, events


def ids(step: ScheduledStep, group: int = 0) -> list[str]:
    """Ids of a group's rows."""
    return [row.request.id for row in step.groups[group].rows]


def arrivals(state: SchedulerState, *names: str) -> set[int]:
    """Of the live requests with these ids."""
    return {r.arrival for group in state.groups for r in (*group.waiting, *group.running) if r.id in names}


def all_decode(rules: Policy, *requests: Request) -> SchedulerState:
    """One group whose requests all decode."""
    state = fresh(rules, *requests)
    while state.groups[0].waiting or not all(live.decoding for live in state.groups[0].running):
        state, _, _ = run_step(state)
    return state
