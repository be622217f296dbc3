"""server/guard/work.py: what is refused takes a share of the processor, and what is admitted is given back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from npucompile.server.guard.refusals import BURST_S, MOST_OWED_S, WORK_SHARE, Refusals
from npucompile.server.guard.work import GuardedWork, off_loop, work


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_the_next_work_of_a_client_waits_until_that_of_its_refusals_is_a_share_of_the_time():
    clock = Clock()
    refusals = Refusals(200, clock)
    first, other = GuardedWork(refusals, "a"), GuardedWork(refusals, "b")
    first.add(1.0)
    # The answer itself waits for nothing that was its own, the next one does.
    assert first.refused(400) == 0
    assert refusals.owed_s("a") == pytest.approx(1 / WORK_SHARE - BURST_S)
    assert (refusals.owed_s("b"), other.refused(400)) == (0, 0)
    second = GuardedWork(refusals, "a")
    second.add(0.5)
    assert second.refused(400) == pytest.approx(1 / WORK_SHARE - BURST_S)
    clock.now_s += 1.5 / WORK_SHARE
    assert refusals.owed_s("a") == 0


def test_what_is_admitted_costs_nothing():
    refusals = Refusals(200, Clock())
    one = GuardedWork(refusals, "a")
    one.add(1.0)
    assert refusals.owed_s("a") > 0
    one.admitted()
    assert refusals.owed_s("a") == 0
    assert one.refused(400) == 0
    one.add(1.0)
    # There was no room for it.
    assert one.refused(503) == 0
    assert refusals.owed_s("a") == 0


def test_nobody_owes_more_than_a_while():
    refusals = Refusals(200, Clock())
    for _ in range(100):
        one = GuardedWork(refusals, "a")
        one.add(10.0)
        one.refused(400)
    assert refusals.owed_s("a") <= MOST_OWED_S


def test_none_waits_where_refusals_are_not_paced():
    one = GuardedWork(Refusals(None, Clock()), "a")
    one.add(1e6)
    assert one.refused(400) == 0
    asyncio.run(one.turn())


def test_work_on_a_thread_waits_for_its_turn_and_is_counted():
    clock = Clock()
    refusals = Refusals(200, clock)

    async def run():
        work.set(GuardedWork(refusals, "a"))
        assert await off_loop(False, threading.get_ident) == threading.get_ident()
        assert await off_loop(True, threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await off_loop(True, lambda: sum(range(10**6)) // 0)
        refusals.charge("a", 1.0)
        waiting = asyncio.ensure_future(off_loop(True, lambda: 7))
        await asyncio.sleep(0.15)
        assert not waiting.done()
        clock.now_s += 100
        assert await waiting == 7
        assert work.get().refused(400) == 0

    asyncio.run(run())
