"""tools/serve/spinning.py: threads of steps do not spin while the stepping thread waits for processors."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.tools.serve import spinning
from npucompile.tools.serve.spinning import FREE_SHARE, LOOK_EVERY_S, STOP_LOOKS, STOP_SHARE, OpenMpTeam, SpinGuard, guard_spinning


class Machine:
    """A guard whose stepping thread waits as told, and the teams it has made."""

    def __init__(self):
        self.now_s = self.waited_s = 0.0
        self.teams = []
        self.guard = SpinGuard(lambda: self.waited_s, lambda: self.now_s, self._team)

    def _team(self):
        team = SimpleNamespace(ended=False)
        team.end = lambda: setattr(team, "ended", True)
        self.teams.append(team)
        return team

    def look(self, share, elapsed_s=LOOK_EVERY_S):
        self.now_s += elapsed_s
        self.waited_s += share * elapsed_s
        self.guard.look()
        return bool(self.teams) and not self.teams[-1].ended


def test_spinning_stops_when_steps_wait_and_starts_again_a_second_after_they_do_not():
    machine = Machine()
    assert [machine.look(0.5) for _ in range(STOP_LOOKS)] == [False] * (STOP_LOOKS - 1) + [True]
    assert all(machine.look(0.3) for _ in range(500))
    looks = next(n for n in range(1000) if not machine.look(0.05))
    assert 0.3 < looks * LOOK_EVERY_S < 3
    assert len(machine.teams) == 1


def test_waits_now_and_then_are_a_servers_own():
    machine = Machine()
    for _ in range(200):
        assert not any(machine.look(0.9) for _ in range(STOP_LOOKS - 1))
        assert not machine.look(STOP_SHARE - 0.01)
    assert not machine.teams


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1e-4, 5)), max_size=60))
def test_there_is_never_more_than_one_team_and_none_is_left(looks):
    machine = Machine()
    for share, elapsed_s in looks:
        machine.look(share, elapsed_s)
        assert all(team.ended for team in machine.teams[:-1])
    machine.guard.close()
    assert all(team.ended for team in machine.teams)


def test_a_team_that_is_not_needed_any_more_has_to_wait_long_to_come_back():
    machine = Machine()
    for _ in range(STOP_LOOKS):
        machine.look(1.0)
    while machine.look(FREE_SHARE / 2):
        pass
    assert not machine.look(1.0)


def _threads():
    return set(os.listdir("/proc/self/task"))


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in /proc")
def test_a_team_is_workers_beside_those_of_other_threads_and_they_end_with_it():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = _threads()
        team = OpenMpTeam()
        # The thread itself, and a worker of its pool.
        _until(lambda: len(_threads() - before) >= 2)
        members = _threads() - before
        team.end()
        _until(lambda: not _threads() & members)
    finally:
        torch.set_num_threads(threads)


def test_an_engine_has_a_guard_until_it_ends_and_devices_have_none(monkeypatch):
    made = []

    class Guard:
        def __init__(self, waited_s):
            self.looks, self.closed, self.waited_s = 0, threading.Event(), waited_s
            made.append(self)

        def look(self):
            assert self.waited_s() >= 0
            self.looks += 1

        def close(self):
            self.closed.set()

    monkeypatch.setattr(spinning, "SpinGuard", Guard)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    engine = SimpleNamespace(executor=object(), thread_id=threading.get_native_id(), alive=True)
    guard_spinning(engine)
    assert not made
    engine.executor = object.__new__(CpuExecutor)
    guard_spinning(engine)
    _until(lambda: made and made[0].looks > 2)
    engine.alive = False
    assert made[0].closed.wait(60)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    guard_spinning(engine)
    assert len(made) == 1
