"""runtime/scheduler/schedule.py: what is planned next, whatever came before, with and without a step in flight."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import FinishEvent, Request
from npucompile.runtime.scheduler.advance import cancel, commit, commit_together, fail_together, launch, launch_together, submit
from npucompile.runtime.scheduler.request_state import Live
from npucompile.runtime.scheduler.schedule import Policy, State, Step, least_loaded, plan, plan_together
from npucompile.runtime.step_outputs import Sampled


def policy(decode=(1, 2, 4), prefill=(4, 8), burst=1, pages=9, requests=8, page_size=2, length=8, drafts=0):
    buckets = (*(Bucket("prefill", 1, q) for q in prefill), *(Bucket("decode", b, drafts + 1) for b in decode))
    return Policy(Limits(page_size, pages, 1 + requests * (drafts + 1), length, drafts + 1, drafts), buckets, burst)


def request(name, prompt=3, max_tokens=4, stop=(), speculative_tokens=None):
    return Request(name, tuple(range(prompt)), max_tokens, stop_token_ids=frozenset(stop), speculative_tokens=speculative_tokens)


def fresh(rules, *requests):
    state = State(rules)
    for item in requests:
        state = submit(state, item, 0.0)
    return state


def gave(step, count=1, token=1):
    """What a step gave that sampled the same token for every row, as many times."""
    decode = step.bucket.kind == "decode"
    return [Sampled((token,) * (count if decode else 1) if turn.samples else (), turn.drafts) for turn in step.turns]


def advance(state, token=1, count=1):
    """Plans, launches and commits one step."""
    step = plan(state)
    state, events = commit(launch(state, step, 1.0), step, gave(step, count, token), 2.0)
    return state, step, events


def until_decoding(state, name="a"):
    while not any(live.id == name and live.decoding for live in state.running):
        state, _, _ = advance(state)
    return state


def ids(step):
    return [turn.request.id for turn in step.turns]


def test_nothing_to_do():
    assert plan(State(policy())) is None


def test_a_prompt_is_chunked_and_then_decoded():
    state = fresh(policy(prefill=(2, 3), length=10, pages=6), request("a", prompt=5, max_tokens=3))
    state, step, _ = advance(state)
    turn = step.turns[0]
    assert (step.bucket.name, step.admitted, turn.tokens, turn.next_token, turn.samples) == ("prefill-b1-q3", "a", (0, 1, 2), 3, False)
    assert turn.pages == 3
    state, step, _ = advance(state, 9)
    turn = step.turns[0]
    assert (step.bucket.name, step.admitted, turn.tokens, turn.start) == ("prefill-b1-q2", None, (3, 4), 3)
    assert (turn.next_token, turn.samples, turn.sample_index) == (-1, True, 0)
    state, step, _ = advance(state, 8)
    turn = step.turns[0]
    assert (step.bucket.name, turn.tokens, turn.start, turn.sample_index, turn.samples) == ("decode-b1-q1", (), 5, 1, True)
    state, step, _ = advance(state, 7)
    assert (step.turns[0].start, step.turns[0].pages) == (6, 4)
    assert plan(state) is None


def test_the_known_token_after_a_chunk_may_be_one_that_was_generated():
    state = fresh(policy(prefill=(3,), length=10, pages=6), request("a", prompt=3))
    state, _, _ = advance(state, 9)
    again = state.running[0].preempted()
    state = State(state.policy, waiting=(again,), arrivals=1)
    step = plan(state)
    assert (step.turns[0].tokens, step.turns[0].next_token) == ((0, 1, 2), 9)
    state, _, _ = advance(state, 9)
    # It is fed what it generated, to the last token: only then does its seat hold what comes next.
    step = plan(state)
    assert (step.bucket.kind, step.turns[0].tokens, step.turns[0].next_token, step.turns[0].sample_index) == ("prefill", (9,), -1, 1)


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
    state = fresh(policy(requests=1, drafts=2, pages=40), request("a"), request("b"))
    state, step, _ = advance(state)
    while step.bucket.kind == "prefill" or plan(state).bucket.kind == "decode":
        assert [live.id for live in state.running] == ["a"]
        state, step, _ = advance(state)
    assert plan(state).admitted == "b"


@pytest.mark.parametrize("pages, admitted", [(9, None), (10, "b")])
def test_admission_leaves_every_running_request_the_pages_of_a_steps_candidates(pages, admitted):
    # "a" holds 3 pages: its four tokens, and so many candidates that the last lies in the third page. "b" takes 4, and "a" keeps 2.
    state = fresh(policy(pages=pages, length=14, drafts=2, burst=9), request("a", prompt=3), request("b", prompt=4))
    state, _, _ = advance(state)
    assert state.used_pages == 3
    assert plan(state).admitted == admitted


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


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"pages": 4}, "4 pages leave 3 .* takes 4, so legal is at least 5"),
        ({"requests": 0, "drafts": 2}, "1 state slots leave 0 .* takes 3, so legal is at least 4"),
        ({"burst": 0}, "prefill_burst is 0; legal is at least 1"),
        ({"decode": ()}, "no decode bucket"),
        ({"prefill": ()}, "no prefill bucket"),
    ],
)
def test_sizes_that_cannot_serve_are_refused(sizes, message):
    with pytest.raises(SpecError, match=message):
        policy(**sizes)


def test_a_decode_bucket_of_another_width_is_refused():
    buckets = (Bucket("prefill", 1, 4), Bucket("decode", 2, 3))
    with pytest.raises(SpecError, match="decode-b2-q3 decodes 3 tokens per request; with 0 drafts, legal is 1"):
        Policy(Limits(2, 9, 9, 8), buckets)
    with pytest.raises(SpecError, match="1 state slots a request with 2 drafts; where requests are decoded, legal is 3, one for each"):
        Policy(Limits(2, 9, 9, 8, 1, 2), buckets)
    Policy(Limits(2, 9, 10, 8, 3, 2), buckets)


# With drafts, and a step in flight.


@pytest.mark.parametrize("own, verified", [(None, 3), (0, 0), (2, 2), (3, 3)])
def test_a_request_verifies_as_many_drafts_as_it_wants(own, verified):
    state = until_decoding(fresh(policy(drafts=3, length=40, pages=40), request("a", speculative_tokens=own)))
    assert plan(state).turns[0].drafts == verified


def test_pages_are_for_the_furthest_a_step_can_reach():
    rules = policy(drafts=3, page_size=1, length=40, pages=41, prefill=(2,))
    state = fresh(rules, request("a", prompt=5, max_tokens=30))
    # Q = 4: the prompt, and what is drafted at its end.
    assert plan(state).turns[0].pages == 5 + 4
    while not state.running or not state.running[0].decoding:
        state, _, _ = advance(state)
    first = plan(state)
    assert (first.turns[0].start, first.turns[0].pages, first.turns[0].sample_index) == (5, 5 + 7, 1)
    # It gives 1 to 4 tokens, so the next one starts at 6 to 9.
    flying = launch(state, first, 0.0)
    second = plan(flying)
    assert (second.turns[0].start, second.turns[0].pages, second.turns[0].sample_index) == (6, 5 + 4 + 7, 2)
    flying = launch(flying, second, 0.0)
    state, _ = commit(flying, first, gave(first, 3), 0.0)
    third = plan(state)
    assert (third.turns[0].start, third.turns[0].pages, third.turns[0].sample_index) == (9, 8 + 4 + 7, 5)
    # Never more than the context has.
    state = until_decoding(fresh(rules, request("a", prompt=35, max_tokens=30)))
    assert plan(state).turns[0].pages == 40


def test_a_prompt_goes_on_while_its_last_chunk_is_in_flight():
    state = fresh(policy(prefill=(2,), length=12, pages=9), request("a", prompt=5, max_tokens=3))
    seen = []
    for _ in range(3):
        step = plan(state)
        state = launch(state, step, 0.0)
        seen.append((step.bucket.kind, step.turns[0].tokens, step.turns[0].start))
    assert seen == [("prefill", (0, 1), 0), ("prefill", (2, 3), 2), ("prefill", (4,), 4)]
    # The first decode step starts where the prompt ends, whatever was sampled there.
    step = plan(state)
    assert (step.bucket.kind, step.turns[0].start, step.turns[0].sample_index) == ("decode", 5, 1)


@pytest.mark.parametrize("prompt, most, drafts", [(3, 2, 0), (3, 2, 3), (6, 9, 0), (6, 9, 3)])
def test_a_request_that_surely_ends_has_no_turn(prompt, most, drafts):
    """With what is in flight it has two tokens at the least: that is all it wants, or all the context holds."""
    state = fresh(
        policy(length=8, drafts=drafts, pages=20), request("a", prompt=prompt, max_tokens=most), request("b", prompt=1, max_tokens=5)
    )
    for _ in range(2):
        state = launch(state, plan(state), 0.0)
    assert [live.id for live in state.running if live.in_flight] == ["a"]
    assert [live.id for live in state.ready] == []
    assert plan(state).admitted == "b"


def test_nobody_waits_for_a_stream_that_ends():
    """The prefill of "a" gives the one token it wants: no decode step is due before "b" is prefilled, though the burst is over."""
    state = fresh(policy(pages=20), request("a", max_tokens=1), request("b"))
    state = launch(state, plan(state), 0.0)
    assert state.burst == state.policy.prefill_burst
    assert plan(state).admitted == "b"


def test_nothing_is_preempted_while_anything_is_in_flight():
    state = fresh(policy(pages=6, decode=(4,)), *(request(n, prompt=3, max_tokens=5) for n in "ab"))
    for _ in range(4):
        state, _, _ = advance(state)
    idle = plan(state)
    assert idle.preempted == ("b",)
    # The same, had a step in which only "a" has a turn been launched and nothing been heard of it.
    step = Step(idle.bucket, idle.turns[:1])
    flying = launch(state, step, 0.0)
    assert plan(flying) is None
    landed, _ = commit(flying, step, gave(step), 0.0)
    assert plan(landed).preempted == ("b",)


def test_a_request_waits_for_the_pages_of_an_older_one_that_ends():
    """Were anybody preempted, it would be the one that lacks pages."""
    rules = policy(pages=6)
    ends = Live(request("a", max_tokens=3), 0, 0.0, (1, 1), computed=4, decoding=True, in_flight=1, pages=3)
    lacks = Live(request("b", max_tokens=9), 1, 0.0, (1, 1), computed=4, decoding=True, pages=2)
    flying = State(rules, running=(ends, lacks), arrivals=2, in_flight=1)
    assert flying.ready == (lacks,)
    assert plan(flying) is None
    step = plan(State(rules, running=(lacks,), arrivals=2))
    assert (ids(step), step.preempted) == (["b"], ())


def test_the_last_served_wait_even_while_their_step_is_in_flight():
    state = fresh(policy(decode=(2,), pages=80, length=40), *(request(n, prompt=1, max_tokens=39) for n in "abc"))
    while state.waiting or not all(live.decoding for live in state.running):
        state, _, _ = advance(state)
    flights, seen = [], []
    for _ in range(9):
        step = plan(state)
        state = launch(state, step, 0.0)
        flights.append(step)
        seen += ids(step)
        if len(flights) > 1:
            done = flights.pop(0)
            state, _ = commit(state, done, gave(done), 0.0)
    assert [seen.count(n) for n in "abc"] == [6, 6, 6]
    assert all(len(set(seen[i : i + 3])) == 3 for i in range(0, 18, 3))


# Any history.


@st.composite
def policies(draw):
    page_size, per_request = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    drafts = draw(st.integers(0, 4))
    return policy(
        decode=draw(st.sets(st.integers(1, 5), min_size=1, max_size=3)),
        prefill=draw(st.sets(st.integers(1, 9), min_size=1, max_size=3)),
        burst=draw(st.integers(1, 3)),
        pages=1 + draw(st.integers(per_request, 3 * per_request)),
        requests=draw(st.integers(1, 6)),
        page_size=page_size,
        length=page_size * per_request,
        drafts=drafts,
    )


def check_state(state):
    """What holds between any two calls."""
    limits = state.policy.limits
    arrivals = [live.arrival for live in (*state.running, *state.waiting)]
    assert arrivals == sorted(set(arrivals))
    assert all((live.pages, live.computed, live.decoding, live.in_flight) == (0, 0, False, 0) for live in state.waiting)
    assert all(live.decoding for live in state.running[:-1])
    assert state.free_pages >= 0
    assert state.free_slots >= 0
    assert len(state.running) < limits.num_seats
    assert state.in_flight >= max((live.in_flight for live in state.running), default=0)
    for live in state.running:
        assert live.computed <= live.pages * limits.page_size
        assert live.total < limits.max_model_len
        assert live.least_total >= live.total


def check_step(state, step):
    """What a planned step promises."""
    limits, bucket = state.policy.limits, step.bucket
    assert 1 <= len(step.turns) <= bucket.batch
    assert len(set(ids(step))) == len(step.turns)
    assert list(step.preempted) == [live.id for live in reversed(state.running)][: len(step.preempted)]
    assert not set(step.preempted) & set(ids(step))
    assert not (step.preempted and state.in_flight)
    held = {live.id: live.pages for live in state.running}
    freed = sum(held[name] for name in step.preempted)
    assert sum(turn.pages - held.get(turn.request.id, 0) for turn in step.turns) <= state.free_pages + freed
    for turn in step.turns:
        assert turn.pages <= limits.pages_per_request
        if bucket.kind == "prefill":
            assert 1 <= len(turn.tokens) <= bucket.q_len
            assert turn.start + len(turn.tokens) <= turn.pages * limits.page_size


class World:
    """Groups that step together, with up to `ahead` steps in flight beyond the one that is waited for, and where the device really is."""

    def __init__(self, rules, groups, ahead, data):
        self.rules, self.ahead, self.data = rules, ahead, data
        self.states = tuple(State(rules) for _ in range(groups))
        self.flights, self.events, self.names = [], [], []
        self.at = [{} for _ in range(groups)]
        self.waited = {}

    @property
    def live(self):
        return [live.id for state in self.states for live in (*state.running, *state.waiting)]

    def submit(self):
        limits, draw = self.rules.limits, self.data.draw
        most = draw(st.none() | st.integers(0, limits.drafts))
        one = request(f"r{len(self.names)}", draw(st.integers(1, limits.max_model_len - 1)), draw(st.integers(1, 20)), (), most)
        self.names.append(one.id)
        chosen = least_loaded(self.states)
        self.states = (*self.states[:chosen], submit(self.states[chosen], one, 0.0), *self.states[chosen + 1 :])

    def cancel(self):
        gone = self.data.draw(st.sampled_from(self.live))
        found = [cancel(state, gone, 0.0) for state in self.states]
        self.states = tuple(state for state, _ in found)
        self.events += [event for _, events in found for event in events]

    def go_on(self):
        """Launches what is planned, or takes in the oldest step where nothing is or too much is in flight."""
        steps = plan_together(self.states)
        assert steps == plan_together(self.states)
        if steps is None:
            assert bool(self.flights) or not self.live
            if self.flights:
                self.take_in()
            return
        self.check_plan(steps)
        given = []
        for group, step in enumerate(steps):
            given.append([self.run(group, step.bucket.kind, turn) for turn in step.turns] if step is not None else ())
        self.states = launch_together(self.states, steps, 0.0)
        self.flights.append((steps, given))
        while len(self.flights) > self.ahead:
            self.take_in()

    def run(self, group, kind, turn):
        """What the device does in a turn: it is where its last step left it, and has pages for all it writes."""
        limits, at = self.rules.limits, self.at[group]
        held = turn.pages * limits.page_size
        if kind == "prefill":
            at[turn.arrival] = turn.start + len(turn.tokens)
            assert min(at[turn.arrival] + limits.drafts, limits.max_model_len) <= held
            return Sampled((1,) if turn.samples else ())
        start = at[turn.arrival]
        assert turn.start <= start <= turn.start + limits.drafts
        drafted = max(min(turn.drafts, limits.max_model_len - start - 1), 0)
        count = self.data.draw(st.integers(1, drafted + 1))
        # The candidates, and the drafts after the last that counts.
        assert min(start + max(1 + drafted, count + limits.drafts), limits.max_model_len) <= held
        at[turn.arrival] = min(start + count, limits.max_model_len)
        return Sampled((1,) * count, drafted)

    def take_in(self, failed=False):
        steps, given = self.flights.pop(0)
        if failed:
            self.states, events = fail_together(self.states, steps, "boom", 0.0)
        else:
            self.states, events = commit_together(self.states, steps, given, 0.0)
        self.events += events
        for state in self.states:
            check_state(state)

    def check_plan(self, steps):
        ran = [step for step in steps if step is not None]
        (bucket,) = {step.bucket for step in ran}
        ready = [state.ready for state in self.states]
        for state, step in zip(self.states, steps, strict=True):
            if step is not None:
                check_step(state, step)
        if bucket.kind == "prefill":
            assert not any(ready) or self.states[0].burst < self.rules.prefill_burst
        else:
            assert [step is None for step in steps] == [not some for some in ready]
            for group, (some, step) in enumerate(zip(ready, steps, strict=True)):
                self.check_fairness(group, some, step)
        # No larger than one of them needs.
        for other in self.rules.buckets:
            if other.kind == bucket.kind and (other.q_len, other.batch) < (bucket.q_len, bucket.batch):
                assert any(len(step.turns) > other.batch or any(len(turn.tokens) > other.q_len for turn in step.turns) for step in ran)

    def check_fairness(self, group, ready, step):
        """As many as fit have a turn, and nobody who could is left out for long."""
        if step is None:
            return
        largest = max(b.batch for b in self.rules.buckets if b.kind == "decode")
        names = [live.id for live in ready if live.id not in step.preempted]
        assert len(step.turns) == min(largest, len(names))
        for name in names:
            key = (group, name)
            self.waited[key] = 0 if name in ids(step) else self.waited.get(key, 0) + 1
            assert self.waited[key] <= -(-self.rules.limits.num_slots // largest)


@settings(max_examples=250, deadline=None)
@given(policies(), st.integers(1, 3), st.integers(0, 1), st.data())
def test_any_history_keeps_the_promises_and_ends(rules, groups, ahead, data):
    world = World(rules, groups, ahead, data)
    for action in data.draw(st.lists(st.sampled_from("sssgggggggcf"), max_size=40)):
        if action == "s":
            world.submit()
        elif action == "c" and world.live:
            world.cancel()
        elif action == "f" and world.flights:
            world.take_in(failed=True)
        else:
            world.go_on()
        for state in world.states:
            check_state(state)
        assert len({state.burst for state in world.states}) == 1
        assert {state.in_flight for state in world.states} == {len(world.flights)}
    # The oldest request of each group finishes within this many steps, so all of them do.
    most = 2 * (rules.prefill_burst + 1) * rules.limits.num_slots * rules.limits.max_model_len
    for _ in range(most * max(len(world.live), 1)):
        if not world.live and not world.flights:
            break
        world.go_on()
    assert plan_together(world.states) is None
    assert sorted(event.request_id for event in world.events if isinstance(event, FinishEvent)) == sorted(world.names)


# Groups that step together.


def advance_all(states, token=1):
    steps = plan_together(states)
    results = [gave(step, token=token) if step else () for step in steps]
    states, events = commit_together(launch_together(states, steps, 1.0), steps, results, 2.0)
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


def test_a_group_that_lacks_pages_makes_all_wait_for_what_is_in_flight():
    rules = policy(pages=6, decode=(4,))
    short = fresh(rules, *(request(n, prompt=3, max_tokens=5) for n in "ab"))
    states = (short, fresh(rules, request("c", prompt=1, max_tokens=7)))
    for _ in itertools.count():
        steps = plan_together(states)
        if any(step and step.preempted for step in steps):
            break
        states, _, _ = advance_all(states)
    # "c" could go on, but all step together.
    resting = (None, steps[1])
    flying = launch_together(states, resting, 0.0)
    assert flying[1].ready
    assert plan_together(flying) is None
    landed, _ = commit_together(flying, resting, [(), gave(steps[1])], 0.0)
    assert plan_together(landed)[0].preempted == ("b",)


def test_a_new_request_goes_where_least_is_to_do():
    rules = policy(pages=40, length=8)
    empty, one = fresh(rules), fresh(rules, request("a"))
    assert least_loaded([one, empty, empty]) == 1
    ran, _, _ = advance(one)
    assert ran.used_pages > 0
    assert least_loaded([ran, one]) == 1
    assert least_loaded([ran, fresh(rules, request("b"), request("c"))]) == 0
