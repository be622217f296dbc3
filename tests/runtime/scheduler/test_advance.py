"""runtime/scheduler/advance.py: what launching and committing a step change; ids may be used again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduling import add, arrivals, fresh, grouped, ids, policy, queued, request, run_step

from npucompile.graphs.steps.score import SCORE
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


def test_a_new_request_goes_to_the_group_with_the_fewest_and_then_with_the_fewest_pages():
    state = add(grouped(RULES, [request("a")], [], []), request("b"))
    assert [group.num_requests for group in state.groups] == [1, 1, 0]
    state, _, _ = run_step(grouped(RULES, [request("a", prompt=9)], [request("b")]))
    assert state.groups[0].used_pages > state.groups[1].used_pages
    assert [group.num_requests for group in submit(state, queued(request("c"))).groups] == [1, 2]
    state = grouped(RULES, [request("a")], [request("b"), request("c")])
    assert [group.num_requests for group in submit(state, queued(request("d"))).groups] == [2, 2]


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
        assert known.key_ids(0, 9) == (0, 1, 2, 3, 4, 5, 9)[: known.num_tokens]
        assert known.num_tokens == known.num_computed_tokens + 1 == row.start + row.num_tokens - row.num_drafts + len(sampled_tokens)
        state, _ = commit(state, step, results, 0.0)
    assert (only(state).output_token_ids, only(state).unscored) == ((9,), 0)


def test_a_prompt_that_score_steps_score_is_known_and_what_they_scored_is_told_once():
    """Whichever chunks are in flight, and after a preemption."""
    asked = replace(request("a", prompt=6, max_tokens=4), prompt_logprobs=0, prompt_logprobs_from=2)
    rules = replace(RULES, buckets=(*RULES.buckets, SCORE.bucket(1, 2)))
    state = submit(fresh(rules), queued(asked, rules.limits.drafts)._replace(unscored=asked.num_scored, in_chunks=True))
    steps, told = [], []
    for kind, start, count, scores in (("prefill", 0, 1, False), ("score", 1, 2, True), ("score", 3, 2, True), ("score", 5, 1, True)):
        steps.append(step := schedule(state))
        (row,) = step.groups[0].rows
        assert (step.bucket.kind, row.start, row.num_tokens, row.scores, row.forced) == (kind, start, count, scores, ())
        state = launch(state, step, 0.0)
    for step, tokens in zip(steps, ((), (2, 3), (4, 5), (9,)), strict=True):
        results = [[SampledTokens(tokens, 0, tuple(Logprobs(-token, ()) for token in tokens))]]
        ((known,),) = computed(state, step, results)
        assert known.key_ids(0, 9) == (0, 1, 2, 3, 4, 5, 9)[: known.num_tokens]
        assert known.output == tuple(token for token in tokens if token == 9)
        state, events = commit(state, step, results, 0.0)
        told += [entry.logprob for event in events for entry in event.prompt_logprobs]
        assert only(state).unscored == 4 - len(told)
        again = only(state).preempted()
        assert again.score_from == (len(told) + 1 if again.unscored else again.num_tokens)
    assert (told, only(state).output_token_ids) == ([-2, -3, -4, -5], (9,))
