"""Turns what happens to requests and steps into the next state, and into what the clients are to hear.

Pure functions over the records of `scheduler.py`. A step passes through here twice: `launch` says what holds while it runs, `commit`
(or `fail`) what its outcome adds. Steps are committed in the order in which they were launched; between the two the next one may be
launched, and its requests may end: what is said of a request that has ended is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..buckets import padded_rows
from ..request import Event, Request, TokenEvent
from ..step_outputs import Sampled
from .request_state import Live
from .schedule import State, Step

Results = Sequence[Sampled | None]
"""What a step gave each of its turns; None where that is unknown because the request has ended (`sampled.read`)."""


def submit(state: State, request: Request, submitted_ms: float) -> State:
    """The state with one more request, last in the queue."""
    live = Live(request, state.arrivals, submitted_ms, accepted=(0,) * state.policy.limits.drafts)
    return replace(state, waiting=(*state.waiting, live), arrivals=state.arrivals + 1)


def cancel(state: State, request_id: str, now_ms: float) -> tuple[State, tuple[Event, ...]]:
    """The state without this request, and its end; both unchanged and empty when it is not live."""
    return _drop(state, {live.arrival for live in (*state.running, *state.waiting) if live.id == request_id}, "cancelled", now_ms)


def launch(state: State, step: Step, now_ms: float) -> State:
    """The state while a step runs that was planned from `state`: its preemption, admission and growth are done, its turns taken."""
    waiting, running = state.waiting, state.running
    if step.preempted:
        kept = len(running) - len(step.preempted)
        waiting = (*(live.preempted() for live in running[kept:]), *waiting)
        running = running[:kept]
    if step.admitted is not None:
        waiting, running = waiting[1:], (*running, waiting[0])
    rank = {turn.arrival: place for place, turn in enumerate(step.turns)}
    decode = step.bucket.kind == "decode"

    def after(live: Live) -> Live:
        place = rank.get(live.arrival)
        if place is None:
            return live
        turn, served = step.turns[place], state.turns + place
        return live.stepping(turn.pages, served) if decode else live.feeding(len(turn.tokens), turn.pages, served, now_ms)

    running = tuple(after(live) for live in running)
    return replace(_launched(state, decode), waiting=waiting, running=running, turns=state.turns + len(step.turns))


def launch_together(states: Sequence[State], steps: Sequence[Step | None], now_ms: float) -> tuple[State, ...]:
    """What `launch` says of every group, for a step of `plan_together`."""
    decode = any(step.bucket.kind == "decode" for step in steps if step is not None)
    return tuple(
        launch(state, step, now_ms) if step is not None else _launched(state, decode) for state, step in zip(states, steps, strict=True)
    )


def commit(state: State, step: Step, results: Results, now_ms: float) -> tuple[State, tuple[Event, ...]]:
    """The state after a step that ran, and what the clients are to hear.

    Args:
        state: in which the step is the oldest in flight.
        results: of each turn.
        now_ms: when they were known.
    """
    rank = {turn.arrival: place for place, turn in enumerate(step.turns)}
    name, padding, decode = step.bucket.name, padded_rows(step.bucket, len(step.turns)), step.bucket.kind == "decode"
    running: list[Live] = []
    events: list[Event] = []
    for live in state.running:
        place = rank.get(live.arrival)
        got = None if place is None else results[place]
        if got is None:
            running.append(live)
            continue
        new, reason = live.output(got.tokens, state.policy.limits.max_model_len)
        if decode:
            live = live.decoded(name, new, len(got.tokens), got.drafted, padding)
        else:
            live = live.prefilled(name, new, padding, now_ms)
        shown = tuple(new[:-1] if reason == "stop" else new)
        if shown:
            events.append(TokenEvent(live.id, shown, got.logprobs[: len(shown)]))
        if reason is None:
            running.append(live)
        else:
            events.append(live.finished(reason, now_ms))
    return replace(state, running=tuple(running), in_flight=state.in_flight - 1), tuple(events)


def commit_together(
    states: Sequence[State], steps: Sequence[Step | None], results: Sequence[Results], now_ms: float
) -> tuple[tuple[State, ...], tuple[Event, ...]]:
    """What `commit` says of every group; `results` has an item per group, unread where it had no turns."""
    committed: list[State] = []
    events: list[Event] = []
    for state, step, found in zip(states, steps, results, strict=True):
        after, new = commit(state, step, found, now_ms) if step is not None else (_taken_in(state), ())
        committed.append(after)
        events += new
    return tuple(committed), tuple(events)


def fail(state: State, step: Step, message: str, now_ms: float) -> tuple[State, tuple[Event, ...]]:
    """The state after a step in flight turned out to have failed: its requests end with reason "error", all others go on."""
    return _drop(_taken_in(state), {turn.arrival for turn in step.turns}, "error", now_ms, message)


def fail_together(
    states: Sequence[State], steps: Sequence[Step | None], message: str, now_ms: float
) -> tuple[tuple[State, ...], tuple[Event, ...]]:
    """What `fail` says of every group."""
    failed: list[State] = []
    events: list[Event] = []
    for state, step in zip(states, steps, strict=True):
        after, new = fail(state, step, message, now_ms) if step is not None else (_taken_in(state), ())
        failed.append(after)
        events += new
    return tuple(failed), tuple(events)


def fail_all(state: State, message: str, now_ms: float) -> tuple[State, tuple[Event, ...]]:
    """The state with no request left: all end with reason "error"."""
    return _drop(state, {live.arrival for live in (*state.running, *state.waiting)}, "error", now_ms, message)


def _launched(state: State, decode: bool) -> State:
    return replace(state, burst=0 if decode else state.burst + 1, in_flight=state.in_flight + 1)


def _taken_in(state: State) -> State:
    return replace(state, in_flight=state.in_flight - 1)


def _drop(
    state: State, arrivals: Collection[int], reason: str, now_ms: float, message: str | None = None
) -> tuple[State, tuple[Event, ...]]:
    events = tuple(live.finished(reason, now_ms, message) for live in (*state.running, *state.waiting) if live.arrival in arrivals)
    waiting, running = (tuple(live for live in lives if live.arrival not in arrivals) for lives in (state.waiting, state.running))
    return replace(state, waiting=waiting, running=running), events
