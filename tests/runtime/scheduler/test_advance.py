"""runtime/scheduler/advance.py: what launching and committing a step change; ids may be used again."""

from __future__ import annotations

import pytest

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import Request, TokenEvent, TokenLogprobs
from npucompile.runtime.scheduler.advance import (
    cancel,
    commit,
    commit_together,
    fail,
    fail_all,
    fail_together,
    launch,
    launch_together,
    submit,
)
from npucompile.runtime.scheduler.schedule import Policy, State, plan, plan_together
from npucompile.runtime.step_outputs import Sampled

DRAFTS = 2
BUCKETS = (Bucket("prefill", 1, 4), Bucket("prefill", 1, 8), *(Bucket("decode", b, DRAFTS + 1) for b in (1, 2, 4)))
RULES = Policy(Limits(2, 60, 1 + 8 * 3, 20, DRAFTS + 1, DRAFTS), BUCKETS)


def request(name, prompt=3, max_tokens=9, stop=(), logprobs=None):
    return Request(name, tuple(range(prompt)), max_tokens, stop_token_ids=frozenset(stop), logprobs=logprobs)


def fresh(*requests):
    state = State(RULES)
    for item in requests:
        state = submit(state, item, 0.0)
    return state


def gave(step, *tokens):
    return [Sampled(tokens if turn.samples else (), turn.drafts) for turn in step.turns]


def advance(state, *tokens):
    step = plan(state)
    return commit(launch(state, step, 1.0), step, gave(step, *(tokens or (1,))), 2.0)


def decoding(*requests):
    """A state in which all of them decode, one token each, and nothing is in flight."""
    state = fresh(*requests)
    while state.waiting:
        step = plan(state)
        # Nobody decodes before all are there.
        state = state if step.bucket.kind == "prefill" else State(RULES, state.waiting, state.running, state.arrivals, state.turns)
        state, _ = advance(state)
    return state


def only(state):
    (live,) = state.running
    return live


def test_a_prefill_advances_when_it_is_launched_and_tells_its_token_when_it_ran():
    state = fresh(request("a"))
    step = plan(state)
    flying = launch(state, step, 5.0)
    live = only(flying)
    assert (flying.waiting, live.computed, live.decoding, live.pages, live.started_ms) == ((), 3, True, 3, 5.0)
    assert (flying.in_flight, flying.burst, flying.turns, live.generated, live.prefill_chunks) == (1, 1, 1, (), ())
    landed, events = commit(flying, step, [Sampled((9,))], 7.0)
    live = only(landed)
    assert events == (TokenEvent("a", (9,)),)
    assert (landed.in_flight, live.generated, live.computed, live.first_token_ms, live.prefill_chunks) == (
        0,
        (9,),
        3,
        7.0,
        ("prefill-b1-q4",),
    )


def test_a_decode_step_advances_by_what_it_gave():
    state = decoding(request("a"))
    step = plan(state)
    flying = launch(state, step, 5.0)
    live = only(flying)
    assert (live.computed, live.in_flight, live.total, live.least_total, flying.burst) == (3, 1, 4, 5, 0)
    landed, events = commit(flying, step, [Sampled((7, 8), drafted=2)], 7.0)
    live = only(landed)
    assert events == (TokenEvent("a", (7, 8)),)
    assert (live.computed, live.in_flight, live.total, live.generated) == (5, 0, 6, (1, 7, 8))
    assert (live.verify_steps, live.drafted_tokens, live.accepted, live.decode_steps) == (1, 2, (1, 0), (("decode-b1-q3", 1),))


def test_outcomes_come_one_step_late():
    state = decoding(request("a"))
    first = plan(state)
    state = launch(state, first, 0.0)
    second = plan(state)
    state = launch(state, second, 0.0)
    assert (only(state).in_flight, state.in_flight) == (2, 2)
    state, _ = commit(state, first, [Sampled((4, 5, 6), 2)], 0.0)
    assert (only(state).computed, only(state).in_flight) == (6, 1)
    state, _ = commit(state, second, [Sampled((7,), 2)], 0.0)
    assert (only(state).generated, only(state).computed, only(state).accepted) == ((1, 4, 5, 6, 7), 7, (1, 1))


@pytest.mark.parametrize(
    "most, stop, sampled, shown, completion, reason",
    [
        (9, (6,), (4, 5, 6), (4, 5), 4, "stop"),
        (9, (6,), (4, 6, 5), (4,), 3, "stop"),
        (9, (6,), (6, 4, 4), (), 2, "stop"),
        (3, (), (4, 7, 7), (4, 7), 3, "length"),
        (3, (7,), (4, 7, 7), (4,), 3, "stop"),
    ],
)
def test_an_output_ends_inside_a_block_and_so_do_its_log_probabilities(most, stop, sampled, shown, completion, reason):
    state = decoding(request("a", max_tokens=most, stop=stop, logprobs=0))
    step = plan(state)
    logprobs = tuple(TokenLogprobs(-float(i), ()) for i in range(3))
    state, events = commit(launch(state, step, 0.0), step, [Sampled(sampled, 2, logprobs)], 0.0)
    told, end = list(events[:-1]), events[-1]
    assert told == ([TokenEvent("a", shown, logprobs[: len(shown)])] if shown else [])
    assert (end.reason, end.completion_tokens) == (reason, completion)
    # What the device accepted is told as it was, wherever the output ended.
    assert end.record.accepted_per_position == (1, 1)
    assert state.running == ()


def test_a_full_context_ends_a_request():
    state = fresh(request("a", prompt=19, max_tokens=50))
    while state.running or state.waiting:
        state, events = advance(state)
    assert (events[-1].reason, events[-1].completion_tokens) == ("length", 1)


def test_cancel_anywhere():
    state = fresh(request("a"), request("b"), request("c"))
    state, _ = advance(state)
    for name in ("a", "c", "b"):
        state, events = cancel(state, name, 5.0)
        assert [(event.request_id, event.reason) for event in events] == [(name, "cancelled")]
        assert cancel(state, name, 5.0) == (state, ())
    assert plan(state) is None


def test_what_is_said_of_a_request_that_has_ended_is_dropped_even_where_its_id_lives_again():
    state = decoding(request("a"), request("b"))
    step = plan(state)
    flying = launch(state, step, 0.0)
    flying, _ = cancel(flying, "a", 0.0)
    flying = submit(flying, request("a", prompt=1), 0.0)
    admitted = plan(flying)
    assert admitted.admitted == "a"
    flying = launch(flying, admitted, 0.0)
    new = flying.running[-1]
    results = [None if turn.arrival == 0 else Sampled((5,)) for turn in step.turns]
    landed, events = commit(flying, step, results, 0.0)
    assert events == (TokenEvent("b", (5,)),)
    assert landed.running[-1] == new
    # And so when it fails.
    failed, events = fail(flying, step, "boom", 0.0)
    assert [event.request_id for event in events] == ["b"]
    assert failed.running == (new,)


def test_failure_ends_the_requests_of_the_step_only():
    state = decoding(*(request(n, prompt=1) for n in "abcde"))
    step = plan(state)
    assert len(step.turns) == 4
    state, events = fail(launch(state, step, 0.0), step, "boom", 9.0)
    ids = [turn.request.id for turn in step.turns]
    assert [(e.request_id, e.reason, e.message) for e in events] == [(n, "error", "boom") for n in sorted(ids)]
    assert (len(state.running), state.in_flight) == (1, 0)
    state, events = fail_all(submit(state, request("f"), 9.0), "end", 9.0)
    assert [e.reason for e in events] == ["error", "error"]
    assert plan(state) is None


def test_failure_ends_requests_whose_next_step_is_in_flight():
    state = decoding(request("a"))
    first = plan(state)
    state = launch(state, first, 0.0)
    second = plan(state)
    state = launch(state, second, 0.0)
    state, events = fail(state, first, "boom", 0.0)
    assert [event.reason for event in events] == ["error"]
    assert commit(state, second, [None], 0.0) == (State(RULES, arrivals=1, turns=state.turns), ())


def test_a_preempted_request_goes_to_the_front_and_keeps_its_tokens():
    tight = Policy(Limits(2, 11, 1 + 8 * 3, 16, 3, 2), BUCKETS)
    state = submit(submit(submit(State(tight), request("a"), 0.0), request("b"), 0.0), request("c", prompt=9), 0.0)
    while not (step := plan(state)).preempted:
        state, _ = commit(launch(state, step, 0.0), step, gave(step, 1), 0.0)
    before = state.running[-1]
    assert step.preempted == ("b",)
    flying = launch(state, step, 0.0)
    assert [live.id for live in flying.waiting] == ["b", "c"]
    again = flying.waiting[0]
    assert (again.generated, again.decoding, again.pages, again.preemptions) == (before.generated, False, 0, 1)
    assert flying.used_pages == flying.running[0].pages == step.turns[0].pages


# Groups.


def test_groups_without_turns_count_the_steps_of_all():
    states = (fresh(request("a")), fresh())
    steps = plan_together(states)
    flying = launch_together(states, steps, 0.0)
    assert [(state.burst, state.in_flight) for state in flying] == [(1, 1), (1, 1)]
    landed, events = commit_together(flying, steps, [gave(steps[0], 1), ()], 0.0)
    assert [(state.burst, state.in_flight) for state in landed] == [(1, 0), (1, 0)]
    assert len(events) == 1
    failed, events = fail_together(flying, steps, "boom", 0.0)
    assert [(state.burst, state.in_flight) for state in failed] == [(1, 0), (1, 0)]
    assert [event.reason for event in events] == ["error"]
    steps = plan_together(landed)
    assert [state.burst for state in launch_together(landed, steps, 0.0)] == [0, 0]


def test_a_step_that_fails_ends_the_requests_of_all_groups_in_it():
    states = (fresh(request("a"), request("later")), fresh(request("b")), fresh())
    steps = plan_together(states)
    states, events = fail_together(launch_together(states, steps, 0.0), steps, "boom", 3.0)
    assert [(event.request_id, event.reason, event.message) for event in events] == [("a", "error", "boom"), ("b", "error", "boom")]
    assert [live.id for live in states[0].waiting] == ["later"]
