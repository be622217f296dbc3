"""runtime/scheduler/turns.py: urgent requests first, tenants in turns, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import add, arrivals, fresh, policy, request, run_step

from npucompile.graphs.errors import SpecError
from npucompile.runtime.request import FinishEvent
from npucompile.runtime.scheduler.advance import cancel
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.turns import MAX_COUNTERS, OUTPUT_WEIGHT, Turns, admitted, in_turn, rank


def order_of_admission(state):
    names = []
    while (step := schedule(state)) is not None:
        names += step.groups[0].admitted
        state, _, _ = run_step(state)
    return names


def roomy(**sizes):
    return policy(pages=200, length=40, **{"requests": 1, "prefill": (40,), "decode": (1,), **sizes})


def test_a_tenant_that_comes_late_is_owed_nothing():
    state = add(fresh(roomy()), *(request(f"{name}{i}", tenant=name) for i in range(8) for name in "ab"))
    for _ in range(30):
        state, _, _ = run_step(state)
    state = add(state, *(request(f"c{i}", tenant="c") for i in range(8)))
    rest = order_of_admission(state)
    first = Counter(name[0] for name in rest[:6])
    assert max(first.values()) <= 1 + min(first[name] for name in "abc")


def test_what_was_preempted_goes_on_before_what_has_not_begun():
    state = add(fresh(policy(pages=6, decode=(4,))), *(request(n, prompt=3, max_tokens=5, tenant=n) for n in "ab"))
    while not schedule(state).groups[0].preempted:
        state, _, _ = run_step(state)
    state = add(state, request("c", tenant="c"), request("urgent", priority=-1))
    assert order_of_admission(state)[:3] == ["urgent", "b", "c"]


def test_without_priorities_and_tenants_nothing_is_counted():
    state = add(fresh(policy()), *(request(f"r{i}") for i in range(4)))
    while schedule(state) is not None:
        assert state.groups[0].turns is None
        state, _, _ = run_step(state)
    # They are forgotten when nobody is left.
    state = add(state, request("a", tenant="a"), request("b", tenant="b"))
    while schedule(state) is not None:
        assert state.groups[0].turns is not None
        state, _, _ = run_step(state)
    assert add(state, request("c", tenant="c")).groups[0].turns is None


def test_counters_are_bounded():
    served = {(0, f"t{i}"): 1 + i for i in range(3 * MAX_COUNTERS)}
    state = add(fresh(roomy()), request("a", tenant="a"), request("b", tenant="b"))
    waiting = state.groups[0].waiting
    turns = admitted(Turns(served, {0: MAX_COUNTERS}), waiting, waiting[:1])
    assert len(turns.served) == MAX_COUNTERS
    assert min(turns.served.values()) == 2 * MAX_COUNTERS + 1
    # What lies below the counter of the last that was admitted says nothing.
    assert admitted(Turns({(0, "x"): 5}, {0: 7}), waiting, waiting[:1]).served == {(0, "a"): 10}


def test_what_is_in_the_caches_costs_nothing():
    waiting = (
        add(fresh(roomy()), request("a0", 9, tenant="a"), request("a1", 9, tenant="a"), request("b0", 4, tenant="b")).groups[0].waiting
    )
    assert admitted(Turns(), waiting, [waiting[0].resumed(8, ())]).served == {(0, "a"): 1}
    assert [r.id for r in in_turn(Turns(), waiting, 99)] == ["a0", "b0", "a1"]
    assert [r.id for r in in_turn(Turns({(0, "b"): 2}), waiting, 99, lambda r: 8 * (r.id[0] == "a"))] == ["a0", "a1", "b0"]


def test_ageing_is_a_setting():
    with pytest.raises(SpecError, match="ageing is 0; legal is at least 1"):
        replace(policy(), ageing=0)


# Any history.


@st.composite
def crowds(draw, priorities=(-1, 0, 1, 5), tenants="abc", most=14):
    """Requests in their order of arrival, and before which step each comes."""
    sizes = st.tuples(st.integers(1, 7), st.integers(1, 6), st.sampled_from(priorities), st.sampled_from(tenants), st.integers(0, 20))
    drawn = sorted(draw(st.lists(sizes, min_size=1, max_size=most)), key=lambda size: size[-1])
    return [(at, request(f"r{i}", p, n, priority=level, tenant=name)) for i, (p, n, level, name, at) in enumerate(drawn)]


@st.composite
def small_policies(draw):
    rules = policy(
        decode=draw(st.sets(st.integers(1, 4), min_size=1, max_size=2)),
        prefill=draw(st.sets(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=2)),
        pages=1 + draw(st.integers(8, 20)),
        requests=draw(st.integers(1, 4)),
        length=16,
        drafts=draw(st.integers(0, 2)),
    )
    return replace(rules, ageing=draw(st.integers(1, 4)))


@settings(max_examples=200, deadline=None)
@given(small_policies(), crowds(), st.data())
def test_any_crowd_is_served_urgent_first_and_to_its_end(rules, crowd, data):
    state, ends, cancelled = fresh(rules), [], set()
    for now in range(4000):
        state = add(state, *(item for at, item in crowd if at == now))
        live = [r for group in state.groups for r in (*group.running, *group.waiting)]
        if live and data.draw(st.integers(0, 30)) == 0:
            state, events = cancel(state, arrivals(state, live[0].id), 0.0)
            cancelled.add(live[0].id)
            ends += events
        group, step = state.groups[0], schedule(state)
        assert list(group.running) == sorted(group.running, key=rank)
        assert [r.arrival for r in group.waiting] == sorted(r.arrival for r in group.waiting)
        if step is None:
            if now > 20:
                break
            continue
        part = step.groups[0]
        new = [row.state for row in part.rows if row.request.id in part.admitted]
        left = [r for r in group.waiting if r.id not in part.admitted]
        for r in new:
            assert r.aged or all(r.level <= other.level for other in left)
        # Whoever is preempted is less urgent than all that go on.
        gone, staying = ([r for r in group.running if (r.id in part.preempted) == yes] for yes in (True, False))
        assert all(rank(r) > rank(other) for r in gone for other in staying)
        state, _, events = run_step(state)
        ends += [event for event in events if isinstance(event, FinishEvent)]
    assert sorted(event.request_id for event in ends) == sorted(item.id for _, item in crowd)


@settings(max_examples=100, deadline=None)
@given(crowds(most=20), st.integers(1, 3), st.integers(1, 3))
def test_nobody_is_overtaken_by_more_than_ageing_allows(crowd, ageing, rows):
    """Later ones get at most `ageing` times the tokens of the older ones' prompts and one's own, and a prompt for each of these."""
    state = fresh(replace(roomy(prefill=((rows, 40),), requests=3), ageing=ageing))
    longest, allowed = max(len(item.prompt) for _, item in crowd), {}
    for now in range(2000):
        new = [item for at, item in crowd if at == now]
        for item in new:
            state = add(state, item)
            waiting = [len(r.request.prompt) for r in state.groups[0].waiting]
            allowed[item.id] = sum(ageing * size + longest for size in waiting)
        step = schedule(state)
        if step is None:
            if now > 20:
                break
            continue
        waiting, names = state.groups[0].waiting, step.groups[0].admitted
        for r in waiting:
            if r.id not in names:
                allowed[r.id] -= sum(len(o.request.prompt) for o in waiting if o.id in names and o.arrival > r.arrival)
                assert allowed[r.id] >= 0
        state, _, _ = run_step(state)
    assert not state.groups[0].num_requests


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_two_tenants_that_always_wait_get_the_same_within_a_bound(data, crowded):
    """The bound of VTC's theorem: twice what one request and the running ones can still be charged."""
    longest, outputs, slots = 12, 6, 3
    rules = (
        roomy(requests=slots, decode=(4,), prefill=(16, (2, 8)))
        if not crowded
        else policy(pages=24, length=18, requests=slots, decode=(4,), prefill=(16, (2, 8)))
    )
    sizes = {name: data.draw(st.tuples(st.integers(1, longest), st.integers(1, outputs)), label=name) for name in "ab"}
    state, served = fresh(rules), Counter()
    bound = 2 * (longest + OUTPUT_WEIGHT * slots * outputs) + longest
    state = add(state, *(request(f"a{i}", *sizes["a"], tenant="a") for i in range(20)))
    for now in range(250):
        for name in "ab":
            waiting = sum(r.request.tenant == name for r in state.groups[0].waiting)
            state = add(state, *(request(f"{name}{now}-{i}", *sizes[name], tenant=name) for i in range(4 - waiting)))
        step = schedule(state)
        for row in step.groups[0].rows:
            new = row.request.id in step.groups[0].admitted and row.state.started_ms is None
            served[row.request.tenant] += len(row.request.prompt) * new + OUTPUT_WEIGHT * row.samples
        state, _, _ = run_step(state)
        assert abs(served["a"] - served["b"]) <= bound
    assert min(served.values()) > 2 * bound or now == 249


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), st.booleans())
def test_an_endless_stream_of_urgent_requests_does_not_starve_one(slots, prompt, short_of_pages):
    rules = policy(pages=9 if short_of_pages else 60, length=16, requests=slots, decode=(4,), prefill=(4, 8))
    state = add(fresh(rules), request("patient", prompt=prompt, max_tokens=4, priority=9))
    for now in range(1500):
        while len(state.groups[0].waiting) < 5:
            state = add(state, request(f"u{now}-{len(state.groups[0].waiting)}", prompt=5, max_tokens=9, tenant=f"{now}"))
        state, _, events = run_step(state)
        if any(isinstance(event, FinishEvent) and event.request_id == "patient" for event in events):
            return
    raise AssertionError("it starves")
