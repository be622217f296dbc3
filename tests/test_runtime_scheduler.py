import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import FinishEvent, Request, TokenEvent
from npucompile.runtime.scheduler import (
    Policy,
    State,
    cancel,
    commit,
    commit_together,
    fail,
    fail_all,
    fail_together,
    least_loaded,
    plan,
    plan_together,
    submit,
)


def policy(decode=(1, 2, 4), prefill=(4, 8), burst=1, pages=9, slots=9, group=1, page_size=2, length=8):
    buckets = (*(Bucket("prefill", 1, q) for q in prefill), *(Bucket("decode", b, 1) for b in decode))
    return Policy(Limits(page_size, pages, slots, length, group), buckets, burst)


def request(name, prompt=3, max_tokens=4, stop=()):
    return Request(name, tuple(range(prompt)), max_tokens, stop_token_ids=frozenset(stop))


def fresh(rules, *requests):
    state = State(rules)
    for item in requests:
        state = submit(state, item, 0.0)
    return state


def advance(state, token=1):
    """Plans and commits one step that samples the same token for every row."""
    step = plan(state)
    state, events = commit(state, step, [[token]] * len(step.turns), started_ms=1.0, now_ms=2.0)
    return state, step, events


def ids(step):
    return [turn.request.id for turn in step.turns]


def test_nothing_to_do():
    assert plan(State(policy())) is None


def test_a_prompt_is_chunked_and_then_decoded():
    state = fresh(policy(prefill=(2, 3), length=10, pages=6), request("a", prompt=5, max_tokens=3))
    state, step, events = advance(state)
    assert (step.bucket.name, step.admitted, step.turns[0].tokens, step.turns[0].samples) == ("prefill-b1-q3", "a", (0, 1, 2), False)
    assert (events, step.turns[0].pages) == ((), 3)
    state, step, events = advance(state, 9)
    assert (step.bucket.name, step.admitted, step.turns[0].tokens, step.turns[0].start) == ("prefill-b1-q2", None, (3, 4), 3)
    assert events == (TokenEvent("a", (9,)),)
    assert step.turns[0].sample_index == 0
    state, step, events = advance(state, 8)
    assert (step.bucket.name, step.turns[0].tokens, step.turns[0].start, step.turns[0].sample_index) == ("decode-b1-q1", (9,), 5, 1)
    state, step, events = advance(state, 7)
    assert step.turns[0].tokens == (8,)
    assert step.turns[0].pages == 4
    assert [type(event) for event in events] == [TokenEvent, FinishEvent]
    assert (events[1].reason, events[1].completion_tokens) == ("length", 3)
    assert plan(state) is None


def test_a_stop_token_counts_but_is_not_shown():
    state = fresh(policy(), request("a", stop={5}))
    state, _, events = advance(state, 5)
    assert [type(event) for event in events] == [FinishEvent]
    assert (events[0].reason, events[0].completion_tokens) == ("stop", 1)


def test_a_full_context_ends_a_request():
    state = fresh(policy(length=8), request("a", prompt=7, max_tokens=50))
    state, _, events = advance(state)
    assert events[-1].reason == "length"
    assert events[-1].completion_tokens == 1


@pytest.mark.parametrize("burst", [1, 2])
def test_streams_wait_for_at_most_the_burst(burst):
    rules = policy(burst=burst, pages=40, prefill=(2,), length=40, decode=(8,))
    state = fresh(rules, request("a", prompt=1, max_tokens=39), *(request(f"b{i}", prompt=6) for i in range(3)))
    kinds = ""
    for _ in range(12):
        state, step, _ = advance(state)
        kinds += step.bucket.kind[0]
    assert kinds == {1: "pdpdpdpdpdpd", 2: "ppdppdppdppd"}[burst]


def test_rotation_is_fair_when_more_run_than_fit():
    state = fresh(policy(decode=(2,), pages=40, length=40), *(request(n, prompt=1, max_tokens=39) for n in "abc"))
    while state.waiting or not all(live.decoding for live in state.running):
        state, _, _ = advance(state)
    seen = []
    for _ in range(9):
        state, step, _ = advance(state)
        seen += ids(step)
    assert [seen.count(n) for n in "abc"] == [6, 6, 6]
    assert all(len(set(seen[i : i + 3])) == 3 for i in range(0, 18, 3))


def test_admission_is_in_order_of_arrival_and_never_overtakes():
    # "big" does not fit beside "a", and "small", which would, waits behind it.
    state = fresh(policy(pages=5), request("a", prompt=3, max_tokens=4), request("big", prompt=7), request("small", prompt=1))
    order = []
    while (step := plan(state)) is not None:
        order += [step.admitted] if step.admitted else []
        state, _, _ = advance(state)
    assert order == ["a", "big", "small"]


def test_admission_waits_for_a_group_of_slots():
    state = fresh(policy(slots=5, group=3, pages=40), request("a"), request("b"))
    state, step, _ = advance(state)
    while step.bucket.kind == "prefill" or plan(state).bucket.kind == "decode":
        assert [live.id for live in state.running] == ["a"]
        state, step, _ = advance(state)
    assert plan(state).admitted == "b"


def test_the_youngest_is_preempted_to_the_front_and_keeps_its_tokens():
    # Five pages: a and b start with two each (three tokens, one to come), and both come to need a third.
    state = fresh(policy(pages=6, decode=(4,)), *(request(n, prompt=3, max_tokens=5) for n in "abc"))
    for expected in (["a"], ["a"], ["b"], ["a", "b"]):
        state, step, _ = advance(state)
        assert ids(step) == expected
    assert [(live.id, live.pages) for live in state.running] == [("a", 3), ("b", 2)]
    before = state.running[1]
    step = plan(state)
    assert (step.preempted, ids(step)) == (("b",), ["a"])
    state, _, _ = advance(state)
    assert [live.id for live in state.waiting] == ["b", "c"]
    assert state.waiting[0].generated == before.generated == (1, 1)
    assert (state.waiting[0].computed, state.waiting[0].pages, state.waiting[0].preemptions) == (0, 0, 1)
    # a finishes first; then b prefills its prompt and what it had generated, and goes on sampling where it was.
    while (step := plan(state)).admitted != "b":
        state, _, _ = advance(state)
    assert step.turns[0].tokens == (0, 1, 2, 1, 1)[: step.bucket.q_len]
    assert step.turns[0].sample_index == 2


def test_cancel_anywhere():
    state = fresh(policy(decode=(1,)), request("a"), request("b"), request("c"))
    state, _, _ = advance(state)
    for name in ("a", "c", "b"):
        state, events = cancel(state, name, 5.0)
        assert [(event.request_id, event.reason) for event in events] == [(name, "cancelled")]
        assert cancel(state, name, 5.0) == (state, ())
    assert plan(state) is None


def test_failure_ends_the_requests_of_the_step_only():
    state = fresh(policy(decode=(2,), pages=40), *(request(n, prompt=1) for n in "abc"))
    while len(state.running) < 3 or plan(state).bucket.kind != "decode":
        state, _, _ = advance(state)
    step = plan(state)
    state, events = fail(state, step, "boom", 9.0)
    assert [(e.request_id, e.reason, e.message) for e in events] == [(n, "error", "boom") for n in sorted(ids(step))]
    assert len(state.running) == 1
    state, events = fail_all(submit(state, request("d"), 9.0), "end", 9.0)
    assert [e.reason for e in events] == ["error", "error"]
    assert plan(state) is None


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"pages": 4}, "4 pages leave 3 .* takes 4, so legal is at least 5"),
        ({"slots": 3, "group": 3}, "3 state slots leave 2 .* takes 3, so legal is at least 4"),
        ({"burst": 0}, "prefill_burst is 0; legal is at least 1"),
        ({"decode": ()}, "no decode bucket"),
        ({"prefill": ()}, "no prefill bucket"),
    ],
)
def test_sizes_that_cannot_serve_are_refused(sizes, message):
    with pytest.raises(SpecError, match=message):
        policy(**sizes)


def test_a_decode_bucket_with_drafts_is_refused():
    buckets = (Bucket("prefill", 1, 4), Bucket("decode", 2, 3))
    with pytest.raises(SpecError, match="decode-b2-q3 decodes 3 tokens per request; this engine decodes 1"):
        Policy(Limits(2, 9, 9, 8), buckets)


@st.composite
def policies(draw):
    page_size, per_request = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    group = draw(st.integers(1, 3))
    return policy(
        decode=draw(st.sets(st.integers(1, 5), min_size=1, max_size=3)),
        prefill=draw(st.sets(st.integers(1, 9), min_size=1, max_size=3)),
        burst=draw(st.integers(1, 3)),
        pages=1 + draw(st.integers(per_request, 3 * per_request)),
        slots=1 + group * draw(st.integers(1, 6)),
        group=group,
        page_size=page_size,
        length=page_size * per_request,
    )


def check_state(state):
    """What holds between any two calls."""
    arrivals = [live.arrival for live in (*state.running, *state.waiting)]
    assert arrivals == sorted(set(arrivals))
    assert all(live.pages == 0 and live.computed == 0 for live in state.waiting)
    assert all(live.decoding for live in state.running[:-1])
    assert state.free_pages >= 0
    assert state.free_slots >= 0
    for live in state.running:
        assert live.computed <= live.pages * state.policy.limits.page_size
        assert live.total < state.policy.limits.max_model_len


def check_step(state, step):
    """What a planned step promises."""
    limits, bucket = state.policy.limits, step.bucket
    assert 1 <= len(step.turns) <= bucket.batch
    assert len(set(ids(step))) == len(step.turns)
    assert list(step.preempted) == [live.id for live in reversed(state.running)][: len(step.preempted)]
    assert not set(step.preempted) & set(ids(step))
    held = {live.id: live.pages for live in state.running}
    freed = sum(held[name] for name in step.preempted)
    assert sum(turn.pages - held.get(turn.request.id, 0) for turn in step.turns) <= state.free_pages + freed
    for turn in step.turns:
        assert 1 <= len(turn.tokens) <= bucket.q_len
        assert turn.start + len(turn.tokens) <= turn.pages * limits.page_size
        assert turn.pages <= limits.pages_per_request
        assert max(turn.write_indices) < limits.slots_per_request


@settings(max_examples=150, deadline=None)
@given(policies(), st.data())
def test_any_history_keeps_the_promises_and_ends(rules, data):
    limits = rules.limits
    names = (f"r{i}" for i in itertools.count())
    state, events = State(rules), []
    waited: dict[str, int] = {}
    for action in data.draw(st.lists(st.sampled_from("sssrrrrrrrcf"), max_size=50)):
        live = [one.id for one in (*state.running, *state.waiting)]
        if action == "s":
            prompt = data.draw(st.integers(1, limits.max_model_len - 1))
            state = submit(state, request(next(names), prompt, data.draw(st.integers(1, 20))), 0.0)
        elif action == "c" and live:
            state, new = cancel(state, data.draw(st.sampled_from(live)), 0.0)
            events += new
        elif action == "f" and live:
            state, new = fail(state, plan(state), "boom", 0.0)
            events += new
        else:
            state, new = checked_step(state, waited)
            events += new
        check_state(state)
    # The oldest request finishes within this many steps, so all of them do.
    turns = (rules.prefill_burst + 1) * limits.num_slots * limits.max_model_len
    for _ in range(turns * (len(state.running) + len(state.waiting))):
        if plan(state) is None:
            break
        state, new = checked_step(state, waited)
        events += new
        check_state(state)
    assert plan(state) is None
    finished = [event.request_id for event in events if isinstance(event, FinishEvent)]
    assert sorted(finished) == sorted(f"r{i}" for i in range(state.arrivals))


def checked_step(state, waited):
    """One committed step, its promises checked; `waited` counts the decode steps each stream was left out of."""
    step = plan(state)
    assert step == plan(state)
    assert (step is None) == (not state.running and not state.waiting)
    if step is None:
        return state, ()
    check_step(state, step)
    decoding = [live.id for live in state.running if live.decoding]
    if step.bucket.kind == "prefill":
        assert not decoding or state.burst < state.policy.prefill_burst
    else:
        largest = max(b.batch for b in state.policy.buckets if b.kind == "decode")
        assert len(step.turns) == min(largest, len(decoding) - sum(name in decoding for name in step.preempted))
        for name in decoding:
            waited[name] = 0 if name in ids(step) or name in step.preempted else waited.get(name, 0) + 1
            assert waited[name] <= -(-state.policy.limits.num_slots // largest)
    return commit(state, step, [[1]] * len(step.turns), started_ms=0.0, now_ms=0.0)


# Groups that step together.


def advance_all(states, token=1):
    steps = plan_together(states)
    tokens = [[[token]] * len(step.turns) if step else () for step in steps]
    states, events = commit_together(states, steps, tokens, started_ms=1.0, now_ms=2.0)
    return states, steps, events


def test_a_group_that_may_prefill_makes_all_prefill_or_rest():
    rules = policy(prefill=(2, 4), pages=40, length=40)
    states = (fresh(rules, request("a", prompt=1, max_tokens=9)), fresh(rules, request("b", prompt=2)), fresh(rules))
    states, steps, events = advance_all(states)
    assert [step and (step.bucket.name, len(step.turns[0].tokens)) for step in steps] == [("prefill-b1-q2", 1), ("prefill-b1-q2", 2), None]
    assert [event.request_id for event in events] == ["a", "b"]
    states = (*states[:2], submit(states[2], request("c", prompt=7), 0.0))
    # All decode in between, as the burst of one says, and then the others rest while "c" prefills.
    states, steps, _ = advance_all(states)
    assert [step and step.bucket.name for step in steps] == ["decode-b1-q1", "decode-b1-q1", None]
    states, steps, _ = advance_all(states)
    assert [step and (step.bucket.name, len(step.turns[0].tokens)) for step in steps] == [None, None, ("prefill-b1-q4", 4)]
    states, steps, _ = advance_all(states)
    assert [step and step.bucket.kind for step in steps] == ["decode", "decode", None]


def test_all_prefill_in_the_largest_size_that_one_of_them_wants():
    rules = policy(prefill=(2, 4, 8), pages=40, length=40)
    states = tuple(fresh(rules, request(name, prompt=size)) for name, size in (("a", 1), ("b", 7), ("c", 3)))
    _, steps, _ = advance_all(states)
    assert [(step.bucket.name, len(step.turns[0].tokens), step.turns[0].samples) for step in steps] == [
        ("prefill-b1-q8", 1, True),
        ("prefill-b1-q8", 7, True),
        ("prefill-b1-q8", 3, True),
    ]


def test_all_decode_in_the_smallest_bucket_that_holds_every_groups_rows():
    rules = policy(decode=(1, 2, 4), pages=40, length=40)
    a, *b = (request(name, prompt=1, max_tokens=9) for name in ("a", "b0", "b1", "b2"))
    states = (fresh(rules, a), fresh(rules, *b))
    while any(state.waiting for state in states) or (steps := plan_together(states))[0].bucket.kind == "prefill":
        states, _, _ = advance_all(states)
    assert [(step.bucket.name, len(step.turns)) for step in steps] == [("decode-b4-q1", 1), ("decode-b4-q1", 3)]
    before = states[0].running[0].padded_rows
    states, _, _ = advance_all(states)
    assert states[0].running[0].padded_rows == before + 3


def test_long_prompts_of_one_group_do_not_starve_the_streams_of_another():
    rules = policy(prefill=(2,), pages=60, length=60, decode=(4,))
    states = (fresh(rules, request("stream", prompt=1, max_tokens=40)), fresh(rules))
    states, _, _ = advance_all(states)
    states = (states[0], submit(submit(states[1], request("long", prompt=40), 0.0), request("longer", prompt=41), 0.0))
    kinds = ""
    for _ in range(12):
        states, steps, _ = advance_all(states)
        kinds += next(step for step in steps if step).bucket.kind[0]
    assert kinds == "dpdpdpdpdpdp"


def test_a_step_that_fails_ends_the_requests_of_all_groups_in_it():
    rules = policy(pages=40)
    states = (fresh(rules, request("a"), request("later")), fresh(rules, request("b")), fresh(rules))
    steps = plan_together(states)
    states, events = fail_together(states, steps, "boom", 3.0)
    assert [(event.request_id, event.reason, event.message) for event in events] == [("a", "error", "boom"), ("b", "error", "boom")]
    assert [live.id for live in states[0].waiting] == ["later"]


def test_a_new_request_goes_where_least_is_to_do():
    rules = policy(pages=40, length=8)
    empty, one = fresh(rules), fresh(rules, request("a"))
    assert least_loaded([one, empty, empty]) == 1
    ran, _, _ = advance(one)
    assert ran.used_pages > 0
    assert least_loaded([ran, one]) == 1
    assert least_loaded([ran, fresh(rules, request("b"), request("c"))]) == 0


@settings(max_examples=100, deadline=None)
@given(policies(), st.integers(1, 3), st.data())
def test_any_history_of_groups_keeps_the_promises_and_ends(rules, groups, data):
    names, names_in = (f"r{i}" for i in itertools.count()), []
    states, events = tuple(State(rules) for _ in range(groups)), []
    for action in data.draw(st.lists(st.sampled_from("sssrrrrrcf"), max_size=40)):
        if action == "s":
            prompt = data.draw(st.integers(1, rules.limits.max_model_len - 1))
            chosen = least_loaded(states)
            names_in.append(next(names))
            new = submit(states[chosen], request(names_in[-1], prompt, data.draw(st.integers(1, 20))), 0.0)
            states = (*states[:chosen], new, *states[chosen + 1 :])
        elif action == "c" and names_in:
            gone = data.draw(st.sampled_from(names_in))
            cancelled = [cancel(state, gone, 0.0) for state in states]
            states, events = tuple(state for state, _ in cancelled), events + [e for _, new in cancelled for e in new]
        elif action == "f" and (steps := plan_together(states)) is not None:
            states, new = fail_together(states, steps, "boom", 0.0)
            events += new
        else:
            states, new = checked_step_of_all(states)
            events += new
    most = (rules.prefill_burst + 1) * rules.limits.num_slots * rules.limits.max_model_len
    for _ in range(most * sum(len(state.running) + len(state.waiting) for state in states)):
        if plan_together(states) is None:
            break
        states, new = checked_step_of_all(states)
        events += new
    assert plan_together(states) is None
    assert sorted(e.request_id for e in events if isinstance(e, FinishEvent)) == sorted(names_in)


def checked_step_of_all(states):
    """One committed step of all groups, its promises checked."""
    steps = plan_together(states)
    assert steps == plan_together(states)
    assert (steps is None) == (not any(state.running or state.waiting for state in states))
    if steps is None:
        return states, ()
    ran = [step for step in steps if step is not None]
    (bucket,) = {step.bucket for step in ran}
    for state, step in zip(states, steps, strict=True):
        if step is not None:
            check_step(state, step)
        if bucket.kind == "decode":
            assert (step is None) == (not any(live.decoding for live in state.running))
    decoding = any(live.decoding for state in states for live in state.running)
    if bucket.kind == "prefill":
        assert not decoding or states[0].burst < states[0].policy.prefill_burst
    # No larger than one of them needs.
    smaller = [b for b in states[0].policy.buckets if b.kind == bucket.kind and (b.q_len, b.batch) < (bucket.q_len, bucket.batch)]
    for other in smaller:
        assert any(len(step.turns) > other.batch or any(len(turn.tokens) > other.q_len for turn in step.turns) for step in ran)
    tokens = [[[1]] * len(step.turns) if step else () for step in steps]
    states, events = commit_together(states, steps, tokens, started_ms=0.0, now_ms=0.0)
    assert len({state.burst for state in states}) == 1
    for state in states:
        check_state(state)
    return states, events
