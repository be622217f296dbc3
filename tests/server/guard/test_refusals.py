"""server/guard/refusals.py: how often a client is refused, whatever it sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.guard.refusals import BURST_S, MAX_CLIENTS, Refusals


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@given(st.sampled_from([0.5, 1.0, 10.0, 200.0]), st.lists(st.floats(0, 3), min_size=1, max_size=100), st.lists(st.integers(0, 2)))
def test_in_any_time_a_client_is_refused_as_often_as_it_may_be_and_no_later_than_that_takes(per_s, pauses_s, others):
    clock = Clock()
    refusals = Refusals(per_s, clock)
    due_s = []
    for pause_s in pauses_s:
        clock.now_s += pause_s
        for other in others:
            refusals.wait_s(f"other {other}")
        wait_s = refusals.wait_s("a")
        due_s.append(clock.now_s + wait_s)
        # What waits does so since the rate is used up, and not for what others were refused.
        assert wait_s <= len(due_s) / per_s
    for first, start_s in enumerate(due_s):
        for last, end_s in enumerate(due_s[first:], first):
            assert last - first + 1 <= max(1.0, BURST_S * per_s) + (end_s - start_s) * per_s + 1 + 1e-6


def test_who_is_seldom_refused_never_waits_and_who_often_is_waits_for_its_turn():
    clock = Clock()
    refusals = Refusals(40, clock)
    for _ in range(100):
        clock.now_s += 0.1
        assert refusals.wait_s("seldom") == pytest.approx(0, abs=1e-9)
    assert [refusals.wait_s("often") for _ in range(10)] == pytest.approx([0] * 10, abs=1e-9)
    assert [refusals.wait_s("often") for _ in range(3)] == pytest.approx([0.025, 0.05, 0.075])
    assert refusals.wait_s("another") == 0
    clock.now_s += 0.33
    assert refusals.wait_s("often") == 0


def test_none_wait_where_none_is_to():
    refusals = Refusals(None, Clock())
    assert {refusals.wait_s("a") for _ in range(1000)} == {0.0}


def test_of_clients_without_number_those_are_kept_that_wait():
    clock = Clock()
    refusals = Refusals(1, clock)
    for number in range(3 * MAX_CLIENTS):
        clock.now_s += 0.01
        refusals.wait_s(f"{number}")
    assert len(refusals._due_s) <= MAX_CLIENTS + 1
    for _ in range(MAX_CLIENTS):
        refusals.wait_s("often")
        refusals.wait_s(f"{clock.now_s}")
        clock.now_s += 0.01
    assert refusals.wait_s("often") > MAX_CLIENTS / 2
