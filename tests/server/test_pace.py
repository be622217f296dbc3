"""server/pace.py: when what waits is delivered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.pace import Pace

INTERVAL_S = 0.005


class Desk:
    """A pace with what its owner does: takes what waits at once when told so, and calls `timer` on time."""

    def __init__(self, interval_s):
        self.pace, self.now_s, self.timer_s = Pace(interval_s), 0.0, None
        self.waiting, self.taken, self.timers = [], [], 0

    def pass_time(self, until_s):
        while self.timer_s is not None and self.timer_s <= until_s:
            self.now_s, self.timer_s = max(self.now_s, self.timer_s), None
            self.timers += 1
            due, self.timer_s = self.pace.timer(self.now_s)
            if due:
                self._take()
        self.now_s = until_s

    def arrive(self, *, urgent=False):
        self.waiting.append(self.now_s)
        rung = self.pace.arrived(self.now_s, urgent=urgent)
        if rung:
            self._take()
            self.timer_s = self.pace.taken(self.now_s)
        return rung

    def _take(self):
        self.taken.append((self.now_s, self.waiting))
        self.waiting = []

    def steps(self, step_s, count):
        """How many steps each delivery took, of steps of the same length."""
        start_s = self.now_s
        for number in range(1, count + 1):
            self.pass_time(start_s + number * step_s)
            self.arrive()
        return [len(waited) for _, waited in self.taken]


@pytest.mark.parametrize("step_s", [0.0051, 0.02, 1.0])
def test_steps_longer_than_the_interval_are_delivered_at_once_without_a_timer(step_s):
    desk = Desk(INTERVAL_S)
    assert desk.steps(step_s, 50) == [1] * 50
    assert desk.timers == 0
    assert desk.timer_s is None


@pytest.mark.parametrize(("step_s", "together"), [(0.0049, 2), (0.0026, 2), (0.0024, 3), (0.0011, 5)])
def test_short_steps_are_delivered_together_at_the_end_of_one_and_not_by_the_timer(step_s, together):
    desk = Desk(INTERVAL_S)
    assert desk.steps(step_s, 60)[:4] == [1, 1, together, together]
    arrivals = {at for _, waited in desk.taken for at in waited}
    assert all(at in arrivals for at, _ in desk.taken)
    assert desk.timers <= len(desk.taken)


def test_an_interval_of_nothing_lets_nothing_wait():
    desk = Desk(0.0)
    assert desk.steps(1e-4, 50) == [1] * 50
    assert desk.timers == 0


def test_what_is_urgent_takes_along_what_waits():
    desk = Desk(INTERVAL_S)
    desk.steps(0.002, 3)
    assert [len(waited) for _, waited in desk.taken] == [1, 1]
    desk.pass_time(desk.now_s + 0.0001)
    assert desk.arrive(urgent=True)
    assert len(desk.taken[-1][1]) == 2


def test_a_step_that_takes_longer_than_was_expected_is_not_waited_for_and_the_timer_ends():
    desk = Desk(INTERVAL_S)
    desk.steps(0.001, 3)
    came_s = desk.now_s
    assert desk.waiting == [came_s]
    desk.pass_time(came_s + 1)
    assert desk.taken[-1] == (pytest.approx(came_s + INTERVAL_S), [came_s])
    assert desk.timer_s is None
    assert desk.timers < 5
    # After a quiet while the first is delivered at once.
    assert desk.arrive()


@given(
    interval_s=st.sampled_from([0.0, 0.001, 0.005, 0.05]),
    script=st.lists(st.tuples(st.floats(0, 0.02), st.booleans() | st.just(False)), max_size=80),
)
def test_nothing_waits_longer_than_the_interval(interval_s, script):
    desk = Desk(interval_s)
    for delay_s, urgent in script:
        desk.pass_time(desk.now_s + delay_s)
        desk.arrive(urgent=urgent)
    desk.pass_time(desk.now_s + 10)
    assert desk.timer_s is None
    assert sum(len(waited) for _, waited in desk.taken) == len(script)
    assert all(at - came <= interval_s * (1 + 1e-9) + 1e-12 for at, waited in desk.taken for came in waited)
