"""runtime/scheduler/schedule.py: which step is next, after any history, with and without a step in flight."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import add, all_decode, arrivals, fresh, grouped, ids, policy, queued, request, run_step

from npucompile.graphs.steps.score import SCORE
from npucompile.graphs.types import Bucket
from npucompile.runtime.request import FinishEvent
from npucompile.runtime.scheduler.advance import cancel, commit, fail, launch
from npucompile.runtime.scheduler.request_state import RequestState
from npucompile.runtime.scheduler.schedule import schedule, wanted_bucket
from npucompile.runtime.scheduler.scheduled_step import GroupStep
from npucompile.runtime.scheduler.state import GroupState, SchedulerState
from npucompile.runtime.step_outputs import SampledTokens
from npucompile.runtime.steps.sizes import Alone, choose


def row(step):
    """The first row of the first group."""
    return step.groups[0].rows[0]


def until_decoding(state, name="a"):
    while not any(live.id == name and live.decoding for live in state.groups[0].running):
        state, _, _ = run_step(state)
    return state


@pytest.mark.parametrize("burst", [1, 2])
def test_streams_wait_for_at_most_the_burst(burst):
    rules = policy(burst=burst, pages=40, prefill=(2,), length=40, decode=(8,))
    state = fresh(rules, request("a", prompt=1, max_tokens=39), *(request(f"b{i}", prompt=6) for i in range(3)))
    kinds = ""
    for _ in range(12):
        state, step, _ = run_step(state)
        kinds += step.bucket.kind[0]
    assert kinds == {1: "pdpdpdpdpdpd", 2: "ppdppdppdppd"}[burst]


def chunks(step, group=0):
    """The bucket, and of each row of a group its request's id and tokens."""
    return step.bucket.name, {row.request.id: row.num_tokens for row in step.groups[group].rows}


@pytest.mark.parametrize("limit, admitted", [({"requests": 2}, "ab"), ({"pages": 11}, "ab"), ({"pages": 12}, "abc"), ({}, "abcd")])
def test_as_many_are_admitted_at_once_as_have_slots_and_pages(limit, admitted):
    # Each takes three pages of four tokens to compute and one to come, and leaves one to each that runs.
    rules = policy(prefill=((4, 4),), **{"pages": 60, "length": 8, "requests": 8, **limit})
    step = schedule(fresh(rules, *(request(name, prompt=4) for name in "abcd")))
    assert step.groups[0].admitted == tuple(admitted)


@pytest.mark.parametrize(
    "lengths, expected",
    [
        # One after the other a step of 32 tokens costs 64, and one of 256 costs 262.
        ([32] * 4, ("prefill-b1-q32", [32])),
        ([32] * 5, ("prefill-b8-q32", [32] * 5)),
        ([5] * 9, ("prefill-b8-q32", [5] * 8)),
        # The oldest is not slowed down for the sake of shorter ones behind it; with rows as long as its own they join it.
        ([100] + [32] * 7, ("prefill-b1-q128", [100])),
        ([100] * 4, ("prefill-b4-q128", [100] * 4)),
        ([100, 500, 70, 128], ("prefill-b4-q128", [100, 128, 70, 128])),
        ([500] + [100] * 3, ("prefill-b4-q128", [128, 100, 100, 100])),
        # A longer one behind it that would get a quarter of its chunk takes as large a step for the rest, so nothing is saved.
        ([32, 32, 128, 128, 128, 128], ("prefill-b1-q32", [32])),
        ([32] * 4 + [160], ("prefill-b8-q32", [32] * 5)),
    ],
)
def test_prompts_share_a_step_where_that_costs_no_more(lengths, expected):
    rules = policy(prefill=(32, 128, (8, 32), (4, 128)), pages=900, length=600, requests=9)
    step = schedule(fresh(rules, *(request(f"r{i}", prompt=size) for i, size in enumerate(lengths))))
    assert (step.bucket.name, [row.num_tokens for row in step.groups[0].rows]) == expected


@pytest.mark.parametrize("burst, streams, expected", [(1, 0, 32), (1, 1, 512), (9, 1, 32)])
def test_a_short_prompt_goes_in_small_steps_unless_it_waits_for_decode_steps_between_them(burst, streams, expected):
    # A step of 32 tokens costs 104, one of 512 costs 521, and one that decodes 99.
    rules = replace(policy(prefill=(32, 512), pages=900, length=600, burst=burst, decode=(1,)), fixed_tokens=99.0)
    state = add(all_decode(rules, *(request(f"stream{i}", prompt=1, max_tokens=500) for i in range(streams))), request("a", prompt=96))
    steps = []
    while any(not live.decoding for live in (*state.groups[0].running, *state.groups[0].waiting)):
        state, step, _ = run_step(state)
        steps.append(step.bucket)
    assert [bucket.q_len for bucket in steps if bucket.kind == "prefill"] == [expected] * -(-96 // expected)


def test_a_step_has_the_rows_and_tokens_that_it_needs_where_these_are_values():
    rules = replace(policy(decode=(4,), prefill=((4, 8),), pages=60, length=20), any_size=frozenset({"prefill", "decode"}))
    state = fresh(rules, request("a", prompt=5), request("b", prompt=3))
    sizes = []
    for _ in range(2):
        state, step, _ = run_step(state)
        sizes.append((step.bucket.name, step.shape.name))
    assert sizes == [("prefill-b4-q8", "prefill-b2-q5"), ("decode-b4-q1", "decode-b2-q1")]


def test_prompts_share_steps_of_any_size_up_to_the_tokens_of_the_largest_bucket():
    rules = replace(policy(decode=(4,), prefill=(8, 64), pages=900, length=200, requests=9), any_size=frozenset({"prefill"}))
    state = fresh(rules, *(request(f"r{i}", prompt=16) for i in range(5)), request("long", prompt=150))
    steps = []
    while state.groups[0].waiting or not all(live.decoding for live in state.groups[0].running):
        state, step, _ = run_step(state)
        if step.bucket.kind == "prefill":
            steps.append((step.bucket.name, step.shape.name, [row.num_tokens for row in step.groups[0].rows]))
    assert steps == [
        ("prefill-b1-q64", "prefill-b4-q16", [16] * 4),
        ("prefill-b1-q64", "prefill-b2-q16", [16] * 2),
        ("prefill-b1-q64", "prefill-b1-q64", [64]),
        ("prefill-b1-q64", "prefill-b1-q64", [64]),
        ("prefill-b1-q8", "prefill-b1-q6", [6]),
    ]


def test_an_older_prompt_in_progress_goes_before_a_younger_one_that_lacks_pages():
    # Of seven pages "a", in progress, holds four and "b", which decodes, three: it needs a fourth.
    rules = policy(prefill=((2, 2),), pages=8, page_size=1, length=7, burst=1)
    older = RequestState(request("a", prompt=3), 0, 0.0, num_computed_tokens=2, num_pages=4)
    lacks = RequestState(request("b", prompt=2), 1, 0.0, output_token_ids=(1, 1), num_computed_tokens=3, decoding=True, num_pages=3)
    state = SchedulerState(rules, (GroupState(running=(older, lacks)),), prefill_steps=1)
    step = schedule(state)
    assert (chunks(step), step.groups[0].preempted) == (("prefill-b2-q2", {"a": 1}), ())
    # The step may be due to other groups: theirs decode meanwhile, and this one rests.
    other = replace(lacks.request, id="c")
    busy = replace(state, groups=(*state.groups, GroupState(running=(lacks._replace(request=other, arrival=2),))))
    step = schedule(busy)
    assert (step.bucket.kind, [ids(step, group) for group in range(2)]) == ("decode", [[], ["c"]])
    # Then "a" decodes too, and as the older one takes the pages of "b".
    state, _, _ = run_step(state)
    step = schedule(state)
    assert (step.bucket.kind, ids(step), step.groups[0].preempted) == ("decode", ["a"], ("b",))


# With drafts, and a step in flight.


def test_a_prompt_goes_on_while_its_last_chunk_is_in_flight():
    state = fresh(policy(prefill=(2,), length=12, pages=9), request("a", prompt=5, max_tokens=3))
    chunks = []
    for _ in range(3):
        step = schedule(state)
        state = launch(state, step, 0.0)
        chunks.append((step.bucket.kind, row(step).token_ids, row(step).start))
    assert chunks == [("prefill", (0, 1), 0), ("prefill", (2, 3), 2), ("prefill", (4,), 4)]
    # The first decode step starts where the prompt ends, whatever was sampled there.
    step = schedule(state)
    assert (step.bucket.kind, row(step).start, row(step).output_index) == ("decode", 5, 1)


@pytest.mark.parametrize("prompt, most, drafts", [(3, 2, 0), (3, 2, 3), (6, 9, 0), (6, 9, 3)])
def test_a_request_that_surely_ends_is_not_scheduled(prompt, most, drafts):
    """Its steps in flight yield at least two tokens, which is all it wants or all the context holds."""
    state = fresh(
        policy(length=8, drafts=drafts, pages=20), request("a", prompt=prompt, max_tokens=most), request("b", prompt=1, max_tokens=5)
    )
    for _ in range(2):
        state = launch(state, schedule(state), 0.0)
    assert [live.id for live in state.groups[0].running if live.steps_in_flight] == ["a"]
    assert not state.groups[0].decodable(state.policy.limits)
    assert schedule(state).groups[0].admitted == ("b",)


def test_nobody_waits_for_a_stream_that_ends():
    """The prefill of "a" gives the one token it wants: no decode step is due before "b" is prefilled, though the burst is over."""
    state = fresh(policy(pages=20), request("a", max_tokens=1), request("b"))
    state = launch(state, schedule(state), 0.0)
    assert state.prefill_steps == state.policy.prefill_burst
    assert schedule(state).groups[0].admitted == ("b",)


# Any history.


@st.composite
def policies(draw):
    page_size, per_request = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    drafts = draw(st.integers(0, 4))
    return policy(
        decode=draw(st.sets(st.integers(1, 5), min_size=1, max_size=3)),
        prefill=draw(st.sets(st.integers(1, 9) | st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3)),
        burst=draw(st.integers(1, 3)),
        pages=1 + draw(st.integers(per_request, 3 * per_request)),
        requests=draw(st.integers(1, 6)),
        page_size=page_size,
        length=page_size * per_request,
        drafts=drafts,
    )


def check_group(policy, group):
    """Checks the invariants of a group between two calls."""
    limits = policy.limits
    arrivals = [live.arrival for live in (*group.running, *group.waiting)]
    assert arrivals == sorted(set(arrivals))
    for live in group.waiting:
        assert (live.num_pages, live.num_computed_tokens, live.decoding, live.steps_in_flight) == (0, 0, False, 0)
    # A step takes all prompts in progress before it admits one.
    assert sum(not live.decoding for live in group.running) <= policy.max_prompts
    assert group.free_pages(limits) >= 0
    assert group.free_slots(limits) >= 0
    assert len(group.running) < limits.num_request_slots
    for live in group.running:
        assert live.num_computed_tokens <= live.num_pages * limits.page_size
        assert live.num_tokens < limits.max_model_len
        assert live.min_num_tokens >= live.num_tokens


def check_part(state, group, bucket, part):
    """Checks one group's part of a scheduled step."""
    limits, names = state.policy.limits, [row.request.id for row in part.rows]
    assert 1 <= len(part.rows) <= bucket.batch
    assert len(set(names)) == len(names)
    assert list(part.preempted) == [live.id for live in reversed(group.running)][: len(part.preempted)]
    assert not set(part.preempted) & set(names)
    assert not (part.preempted and state.steps_in_flight)
    pages = {live.id: live.num_pages for live in group.running}
    freed = sum(pages[name] for name in part.preempted)
    assert sum(row.num_pages - pages.get(row.request.id, 0) for row in part.rows) <= group.free_pages(limits) + freed
    for row in part.rows:
        assert row.num_pages <= limits.pages_per_request
        assert 1 <= row.num_tokens <= bucket.q_len
    if bucket.kind == "prefill":
        check_prompts(state, group, bucket, part)


def check_prompts(state, group, bucket, part):
    """Rows are the first prompts in order of arrival, and what is admitted fits."""
    limits, rows = state.policy.limits, part.rows
    started = [live for live in group.running if not live.decoding]
    assert [row.state for row in rows] == [*started, *group.waiting][: len(rows)]
    assert part.admitted == tuple(row.request.id for row in rows[len(started) :])
    assert len(part.admitted) * limits.slots_per_request <= group.free_slots(limits)
    assert len(group.running) + len(part.admitted) < limits.num_request_slots
    for row in rows:
        remaining = row.state.num_tokens - row.start
        assert row.num_tokens == min(remaining, bucket.q_len) == len(row.token_ids)
        assert row.start + row.num_tokens <= row.num_pages * limits.page_size
    # Each is admitted only with pages to spare for a step of all that run by then.
    free = group.free_pages(limits)
    for running, row in enumerate(rows[len(started) :], len(group.running)):
        assert row.num_pages + running * state.policy.pages_for(state.policy.candidates) <= free
        free -= row.num_pages


def stuck(state, group):
    """Whether a group cannot decode for want of pages while its oldest request that runs is a prompt in progress."""
    limits, Q = state.policy.limits, state.policy.candidates
    decodable = group.decodable(limits)
    if not decodable or group.running[0].decoding or state.steps_in_flight:
        return False
    # The oldest that decodes could keep the pages of all that are younger.
    oldest = decodable[0]
    needed = state.policy.pages_for(oldest.num_computed_tokens + 2 * Q - 1) - oldest.num_pages
    return needed > group.free_pages(limits) + sum(live.num_pages for live in group.running if live.arrival > oldest.arrival)


class World:
    """Groups with up to `ahead` steps in flight besides the oldest, and the position of each request on the device."""

    def __init__(self, rules, groups, ahead, data):
        self.rules, self.ahead, self.data = rules, ahead, data
        self.state = grouped(rules, *[()] * groups)
        self.flights, self.events, self.names = [], [], []
        self.at = {}
        self.waited = {}

    @property
    def live(self):
        return [live.id for group in self.state.groups for live in (*group.running, *group.waiting)]

    def submit(self):
        limits, draw = self.rules.limits, self.data.draw
        most = draw(st.none() | st.integers(0, limits.drafts))
        new = request(f"r{len(self.names)}", draw(st.integers(1, limits.max_model_len - 1)), draw(st.integers(1, 20)), (), most)
        self.names.append(new.id)
        self.state = add(self.state, new)

    def cancel(self):
        self.state, events = cancel(self.state, arrivals(self.state, self.data.draw(st.sampled_from(self.live))), 0.0)
        self.events += events

    def go_on(self):
        """Launches what is scheduled, or finishes the oldest step where nothing is or too much is in flight."""
        step = schedule(self.state)
        assert step == schedule(self.state)
        if step is None:
            assert bool(self.flights) or not self.live
            if self.flights:
                self.finish_oldest()
            return
        self.check_step(step)
        results = [[self.run(step.bucket.kind, row) for row in part.rows] for part in step.groups]
        self.state = launch(self.state, step, 0.0)
        self.flights.append((step, results))
        while len(self.flights) > self.ahead:
            self.finish_oldest()

    def run(self, kind, row):
        """Runs a row as the device does: from where its last step left it, with pages for all that it writes."""
        limits, arrival, capacity = self.rules.limits, row.state.arrival, row.num_pages * self.rules.limits.page_size
        if kind == "prefill":
            self.at[arrival] = row.start + row.num_tokens
            assert min(self.at[arrival] + limits.drafts, limits.max_model_len) <= capacity
            return SampledTokens((1,) if row.samples else ())
        start = self.at[arrival]
        assert row.start <= start <= row.start + limits.drafts
        drafted = max(min(row.num_drafts, limits.max_model_len - start - 1), 0)
        count = self.data.draw(st.integers(1, drafted + 1))
        # The candidates, and the drafts after the last that counts.
        assert min(start + max(1 + drafted, count + limits.drafts), limits.max_model_len) <= capacity
        self.at[arrival] = min(start + count, limits.max_model_len)
        return SampledTokens((1,) * count, drafted)

    def finish_oldest(self, failed=False):
        step, results = self.flights.pop(0)
        if failed:
            self.state, events = fail(self.state, step, "boom", 0.0)
        else:
            self.state, events = commit(self.state, step, results, 0.0)
        self.events += events
        self.check()

    def check(self):
        """Checks the invariants between two calls."""
        assert self.state.steps_in_flight == len(self.flights)
        for group in self.state.groups:
            check_group(self.rules, group)
            assert len(self.flights) >= max((live.steps_in_flight for live in group.running), default=0)

    def check_step(self, step):
        bucket, decodable = step.bucket, [group.decodable(self.rules.limits) for group in self.state.groups]
        for group, part in zip(self.state.groups, step.groups, strict=True):
            if part != GroupStep():
                check_part(self.state, group, bucket, part)
        resting = [not some or stuck(self.state, group) for some, group in zip(decodable, self.state.groups, strict=True)]
        if bucket.kind == "prefill":
            assert all(resting) or self.state.prefill_steps < self.rules.prefill_burst
            # Nobody waits where prompts go on because no group can decode.
            streams = max(map(len, decodable)) if self.state.prefill_steps < self.rules.prefill_burst else 0
            self.check_shares(step, streams)
        else:
            assert [not part.rows for part in step.groups] == resting
            for group, (some, part) in enumerate(zip(decodable, step.groups, strict=True)):
                self.check_fairness(group, some, part)
        # No bucket of fewer tokens holds the same rows.
        assert any(part.rows for part in step.groups)
        for smaller in self.rules.buckets:
            if smaller.kind == bucket.kind and smaller.tokens < bucket.tokens:
                assert any(len(part.rows) > smaller.batch or any(r.num_tokens > smaller.q_len for r in part.rows) for part in step.groups)

    def check_shares(self, step, streams):
        """The oldest prompts get as much as by themselves, and others share where it costs no more than all groups' first ones, then their
        second ones, and so on."""
        prefill, rules = [b for b in self.rules.buckets if b.kind == "prefill"], self.rules
        longest = max(b.q_len for b in prefill)
        rows = [[row.state.num_tokens - row.start for row in part.rows] for part in step.groups]
        lengths = [max(column) for column in itertools.zip_longest(*rows, fillvalue=0)]
        between = rules.price(choose(rules.buckets, streams)) / rules.prefill_burst if streams else 0.0
        assert step.bucket.q_len >= Alone([(b.q_len, rules.price(b)) for b in prefill], between).chunk(lengths[0])
        one_by_one = sum(min(rules.price(b) for b in prefill if b.q_len >= min(length, longest)) for length in lengths)
        assert rules.price(step.bucket) <= one_by_one + 1e-9

    def check_fairness(self, group, decodable, part):
        """As many requests as fit have a row, and none that could have one waits for long."""
        if not part.rows:
            return
        largest = max(b.batch for b in self.rules.buckets if b.kind == "decode")
        names = [live.id for live in decodable if live.id not in part.preempted]
        assert len(part.rows) == min(largest, len(names))
        for name in names:
            key = (group, name)
            self.waited[key] = 0 if name in [row.request.id for row in part.rows] else self.waited.get(key, 0) + 1
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
            world.finish_oldest(failed=True)
        else:
            world.go_on()
        world.check()
    # The oldest request of each group finishes within this many steps, so all of them do.
    most = 2 * (rules.prefill_burst + 1) * rules.limits.num_slots * rules.limits.max_model_len
    for _ in range(most * max(len(world.live), 1)):
        if not world.live and not world.flights:
            break
        world.go_on()
    assert schedule(world.state) is None
    assert sorted(event.request_id for event in world.events if isinstance(event, FinishEvent)) == sorted(world.names)


def test_the_bucket_that_a_step_would_take_if_it_could_run():
    rules = policy(decode=(4,), prefill=(8,), pages=90, length=20)
    short, shared, long = Bucket("prefill", 1, 4), Bucket("prefill", 4, 8), Bucket("prefill", 1, 16)
    state = fresh(rules, request("a", prompt=3))
    assert wanted_bucket(state, [short, shared, long]) == short
    assert wanted_bucket(state, [shared, long]) is None
    # Prompts that go one after the other would share, and one that takes two chunks would take one.
    assert wanted_bucket(fresh(rules, *(request(name, prompt=8) for name in "abcd")), [shared, long]) == shared
    assert wanted_bucket(fresh(rules, request("a", prompt=9)), [shared, long]) == long
    two, eight = Bucket("decode", 2, 1), Bucket("decode", 8, 1)
    state = until_decoding(state)
    assert wanted_bucket(state, [two, eight]) == two
    assert wanted_bucket(state, [eight]) is None


def test_all_groups_score_where_the_first_prompt_of_one_is_scored():
    """Other prompts share its step from behind, and one that is scored waits for those before it."""
    rules = policy(prefill=(8,), length=16, pages=33)
    rules = replace(rules, buckets=(*rules.buckets, SCORE.bucket(2, 4)))
    scored = queued(replace(request("s", prompt=7), prompt_logprobs=0))._replace(unscored=6, in_chunks=True)
    groups = [[queued(request("a", prompt=3)), scored], [queued(request("b", prompt=9))]]
    state = SchedulerState(rules, tuple(GroupState(waiting=tuple(own)) for own in groups))
    step = schedule(state)
    assert (step.bucket.kind, ids(step), ids(step, 1)) == ("prefill", ["a"], ["b"])
    state = SchedulerState(rules, (GroupState(waiting=(scored, groups[0][0])), GroupState(waiting=tuple(groups[1]))))
    step = schedule(state)
    assert (step.bucket, ids(step), ids(step, 1)) == (SCORE.bucket(2, 4), ["s", "a"], ["b"])
    assert [[row.scores for row in part.rows] for part in step.groups] == [[True, False], [False]]
    assert [row.num_tokens for part in step.groups for row in part.rows] == [4, 3, 4]
