"""runtime/scheduler/advance.py: what launching and committing a step change; ids may be used again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduling import add, arrivals, fresh, grouped, ids, policy, queued, request, run_step, sampled

from npucompile.runtime.request import Logprobs, TokenEvent
from npucompile.runtime.scheduler.advance import cancel, commit, computed, fail, fail_all, launch, submit
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.step_outputs import SampledTokens

RULES = policy(pages=60, length=20, drafts=2)


def decoding(*requests):
    """A state in which all requests decode, with one token each and nothing in flight."""
    state = fresh(RULES, *requests)
    while state.groups[0].waiting:
        # All prefill before any decodes.
        state, _, _ = run_step(replace(state, prefill_steps=0))
    return state


def only(state):
    (live,) = state.groups[0].running
    return live


def test_a_prefill_advances_when_it_is_launched_and_gives_its_token_when_it_ran():
    state = fresh(RULES, request("a"))
    step = schedule(state)
    flying = launch(state, step, 5.0)
    live = only(flying)
    assert (flying.groups[0].waiting, live.num_computed_tokens, live.decoding, live.num_pages, live.started_ms) == ((), 3, True, 3, 5.0)
    assert (flying.steps_in_flight, flying.prefill_steps, flying.num_scheduled) == (1, 1, 1)
    assert (live.output_token_ids, live.record.prefill_chunks) == ((), ())
    landed, events = commit(flying, step, [[SampledTokens((9,))]], 7.0)
    live = only(landed)
    assert events == (TokenEvent("a", (9,)),)
    assert (landed.steps_in_flight, live.output_token_ids, live.num_computed_tokens) == (0, (9,), 3)
    assert (live.record.first_token_ms, live.record.prefill_chunks) == (7.0, ("prefill-b1-q4",))


def test_a_decode_step_advances_by_what_it_sampled():
    state = decoding(request("a"))
    step = schedule(state)
    flying = launch(state, step, 5.0)
    live = only(flying)
    assert (live.num_computed_tokens, live.steps_in_flight, live.num_tokens, live.min_num_tokens) == (3, 1, 4, 5)
    assert flying.prefill_steps == 0
    landed, events = commit(flying, step, [[SampledTokens((7, 8), num_drafts=2)]], 7.0)
    live = only(landed)
    assert events == (TokenEvent("a", (7, 8)),)
    assert (live.num_computed_tokens, live.steps_in_flight, live.num_tokens, live.output_token_ids) == (5, 0, 6, (1, 7, 8))
    record = live.record
    assert (record.verify_steps, record.drafted_tokens, record.accepted_per_position) == (1, 2, (1, 0))
    assert record.decode_steps == (("decode-b1-q3", 1),)


def test_results_come_one_step_late():
    state = decoding(request("a", max_tokens=9))
    first = schedule(state)
    state = launch(state, first, 0.0)
    second = schedule(state)
    state = launch(state, second, 0.0)
    assert (only(state).steps_in_flight, state.steps_in_flight) == (2, 2)
    state, _ = commit(state, first, [[SampledTokens((4, 5, 6), 2)]], 0.0)
    assert (only(state).num_computed_tokens, only(state).steps_in_flight) == (6, 1)
    state, _ = commit(state, second, [[SampledTokens((7,), 2)]], 0.0)
    live = only(state)
    assert (live.output_token_ids, live.num_computed_tokens, live.record.accepted_per_position) == ((1, 4, 5, 6, 7), 7, (1, 1))


@pytest.mark.parametrize(
    "most, stop, tokens, visible, completion, reason",
    [
        (9, (6,), (4, 5, 6), (4, 5), 4, "stop"),
        (9, (6,), (4, 6, 5), (4,), 3, "stop"),
        (9, (6,), (6, 4, 4), (), 2, "stop"),
        (3, (), (4, 7, 7), (4, 7), 3, "length"),
        (3, (7,), (4, 7, 7), (4,), 3, "stop"),
    ],
)
def test_an_output_ends_inside_a_block_and_so_do_its_log_probabilities(most, stop, tokens, visible, completion, reason):
    state = decoding(request("a", max_tokens=most, stop=stop, logprobs=0))
    step = schedule(state)
    logprobs = tuple(Logprobs(-float(i), ()) for i in range(3))
    state, events = commit(launch(state, step, 0.0), step, [[SampledTokens(tokens, 2, logprobs)]], 0.0)
    token_events, end = list(events[:-1]), events[-1]
    assert token_events == ([TokenEvent("a", visible, logprobs[: len(visible)])] if visible else [])
    assert (end.reason, end.completion_tokens) == (reason, completion)
    # The record has what the device accepted, wherever the output ended.
    assert end.record.accepted_per_position == (1, 1)
    assert state.groups[0].running == ()


def test_a_full_context_ends_a_request():
    state = fresh(RULES, request("a", prompt=19, max_tokens=50))
    while state.groups[0].num_requests:
        state, _, events = run_step(state)
    assert (events[-1].reason, events[-1].completion_tokens) == ("length", 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_cancel_anywhere(groups):
    state = add(grouped(RULES, *[()] * groups), request("a"), request("b"), request("c"))
    state, _, _ = run_step(state)
    for name in ("a", "c", "b"):
        gone = arrivals(state, name)
        state, events = cancel(state, gone, 5.0)
        assert [(event.request_id, event.reason) for event in events] == [(name, "cancelled")]
        assert cancel(state, gone, 5.0) == (state, ())
    assert schedule(state) is None


def test_results_for_a_request_that_has_ended_are_dropped_even_where_its_id_lives_again():
    state = decoding(request("a"), request("b"))
    step = schedule(state)
    flying = launch(state, step, 0.0)
    flying, _ = cancel(flying, arrivals(flying, "a"), 0.0)
    flying = add(flying, request("a", prompt=1))
    admission = schedule(flying)
    assert admission.groups[0].admitted == ("a",)
    flying = launch(flying, admission, 0.0)
    new = flying.groups[0].running[-1]
    results = [[None if row.request.id == "a" else SampledTokens((5,)) for row in step.groups[0].rows]]
    landed, events = commit(flying, step, results, 0.0)
    assert events == (TokenEvent("b", (5,)),)
    assert landed.groups[0].running[-1] == new
    # The same when the step fails.
    failed, events = fail(flying, step, "boom", 0.0)
    assert [event.request_id for event in events] == ["b"]
    assert failed.groups[0].running == (new,)


def test_failure_ends_the_requests_of_the_step_only():
    state = decoding(*(request(n, prompt=1) for n in "abcde"))
    step = schedule(state)
    assert len(ids(step)) == 4
    state, events = fail(launch(state, step, 0.0), step, "boom", 9.0)
    assert [(e.request_id, e.reason, e.message) for e in events] == [(n, "error", "boom") for n in sorted(ids(step))]
    assert (len(state.groups[0].running), state.steps_in_flight) == (1, 0)
    state, events = fail_all(add(state, request("f")), "end", 9.0)
    assert [e.reason for e in events] == ["error", "error"]
    assert schedule(state) is None


def test_failure_ends_requests_whose_next_step_is_in_flight():
    state = decoding(request("a"))
    first = schedule(state)
    state = launch(state, first, 0.0)
    second = schedule(state)
    state = launch(state, second, 0.0)
    state, events = fail(state, first, "boom", 0.0)
    assert [event.reason for event in events] == ["error"]
    assert commit(state, second, [[None]], 0.0) == (replace(fresh(RULES), num_scheduled=state.num_scheduled), ())


def test_a_preempted_request_goes_to_the_front_and_keeps_its_tokens():
    state = fresh(policy(pages=11, length=16, drafts=2), request("a", max_tokens=9), request("b", max_tokens=9), request("c", prompt=9))
    while not (step := schedule(state)).groups[0].preempted:
        state, _, _ = run_step(state)
    before = state.groups[0].running[-1]
    assert step.groups[0].preempted == ("b",)
    flying = launch(state, step, 0.0).groups[0]
    assert [live.id for live in flying.waiting] == ["b", "c"]
    preempted = flying.waiting[0]
    assert (preempted.output_token_ids, preempted.decoding, preempted.num_pages) == (before.output_token_ids, False, 0)
    assert preempted.record.preemptions == 1
    assert flying.used_pages == flying.running[0].num_pages == step.groups[0].rows[0].num_pages


# Several groups.


def test_a_new_request_goes_to_the_group_with_the_fewest_and_then_with_the_fewest_pages():
    state = add(grouped(RULES, [request("a")], [], []), request("b"))
    assert [group.num_requests for group in state.groups] == [1, 1, 0]
    state, _, _ = run_step(grouped(RULES, [request("a", prompt=9)], [request("b")]))
    assert state.groups[0].used_pages > state.groups[1].used_pages
    assert [group.num_requests for group in submit(state, queued(request("c"))).groups] == [1, 2]
    state = grouped(RULES, [request("a")], [request("b"), request("c")])
    assert [group.num_requests for group in submit(state, queued(request("d"))).groups] == [2, 2]


def test_a_step_that_fails_ends_the_requests_of_all_groups_in_it():
    state = grouped(RULES, [request("a"), request("later")], [request("b")], [])
    step = schedule(state)
    state, events = fail(launch(state, step, 0.0), step, "boom", 3.0)
    assert [(event.request_id, event.reason, event.message) for event in events] == [("a", "error", "boom"), ("b", "error", "boom")]
    assert [live.id for live in state.groups[0].waiting] == ["later"]
    assert state.steps_in_flight == 0


def test_each_group_gets_its_own_results():
    state = grouped(RULES, [request("a")], [], [request("b")])
    step = schedule(state)
    results = sampled(step, 4)[:2] + sampled(step, 5)[2:]
    state, events = commit(launch(state, step, 0.0), step, results, 0.0)
    assert events == (TokenEvent("a", (4,)), TokenEvent("b", (5,)))
    assert [live.last_scheduled for group in state.groups for live in group.running] == [0, 1]


def test_tokens_of_a_prompt_that_a_step_scored_are_known_before_those_behind_it():
    """What is kept of prefixes goes by their order."""
    asked = replace(request("a", prompt=6, max_tokens=4), prompt_logprobs=0)
    state = fresh(replace(RULES, limits=replace(RULES.limits, bitmasks=1, bitmask_words=1)))
    state = submit(state, queued(asked, RULES.limits.drafts)._replace(unscored=asked.num_scored))
    for forced, sampled_tokens in (((1,), (1,)), ((2, 3, 4), (2, 3)), ((4, 5), (4, 5, 9))):
        step = schedule(state)
        (row,) = step.groups[0].rows
        assert row.forced == forced
        results = [[SampledTokens(sampled_tokens, row.num_drafts)]]
        state = launch(state, step, 0.0)
        ((known,),) = computed(state, step, results)
        assert known.token_ids(0, 9) == (0, 1, 2, 3, 4, 5, 9)[: known.num_tokens]
        assert known.num_tokens == known.num_computed_tokens + 1 == row.start + row.num_tokens - row.num_drafts + len(sampled_tokens)
        state, _ = commit(state, step, results, 0.0)
    assert (only(state).output_token_ids, only(state).unscored) == ((9,), 0)
