"""server/requests/shared_threads.py: whose work is next."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.server.requests.shared_threads import LASTING_S, SharedThreads, asking


def submit(threads: SharedThreads, client: str, work, lasts: bool | None = None) -> Future:
    token = asking.set(client)
    try:
        return threads.submit(work, lasts=lasts)
    finally:
        asking.reset(token)


@pytest.fixture
def gate():
    opened = threading.Event()
    yield opened
    opened.set()


def test_a_client_that_comes_second_is_next_whatever_the_first_has_waiting(gate):
    order = []
    with contextlib.closing(SharedThreads(1, "t")) as threads:
        submit(threads, "many", lambda: gate.wait(30))
        waiting = [submit(threads, "many", lambda: order.append("many")) for _ in range(50)]
        second = [submit(threads, "few", lambda: order.append("few")) for _ in range(2)]
        gate.set()
        for work in (*waiting, *second):
            work.result(30)
    assert order.index("few") == 0
    assert order[:20].count("few") == 2


def test_what_lasts_leaves_a_thread_to_what_does_not(gate):
    with contextlib.closing(SharedThreads(2, "t")) as threads:
        slow = [submit(threads, client, lambda: gate.wait(30), lasts=True) for client in ("a", "b", "c")]
        assert submit(threads, "d", lambda: 7).result(30) == 7
        assert submit(threads, "a", lambda: 8, lasts=False).result(30) == 8
        assert [work.running() for work in slow] == [True, False, False]
        gate.set()
        assert [work.result(30) for work in slow] == [True] * 3


def test_a_client_whose_work_took_long_is_taken_to_go_on_so(gate):
    now_s = [0.0]
    with contextlib.closing(SharedThreads(2, "t", lambda: now_s[0])) as threads:

        def slow():
            now_s[0] += 2 * LASTING_S

        submit(threads, "slow", slow).result(30)
        submit(threads, "slow", lambda: 1).result(30)
        held = [submit(threads, "slow", lambda: gate.wait(30)) for _ in range(2)]
        assert submit(threads, "quick", lambda: 7).result(30) == 7
        assert not held[1].running()
        gate.set()


def test_no_client_has_all_of_many_threads(gate):
    with contextlib.closing(SharedThreads(8, "t")) as threads:
        for _ in range(20):
            submit(threads, "many", lambda: gate.wait(30))
        assert submit(threads, "other", lambda: 7).result(30) == 7
        gate.set()


def test_what_waits_is_cancelled_with_the_threads_and_what_fails_raises(gate):
    threads = SharedThreads(1, "t")
    failed = submit(threads, "a", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(30)
    running = submit(threads, "a", lambda: gate.wait(30))
    while not running.running():
        pass
    waiting = submit(threads, "b", lambda: 1)
    gone = submit(threads, "c", lambda: 1)
    assert gone.cancel()
    threading.Timer(0.1, gate.set).start()
    threads.close()
    assert running.result(0) is True
    assert waiting.cancelled()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 3), st.booleans()), max_size=30), st.integers(1, 3))
def test_all_work_is_done_and_clients_with_work_waiting_are_served_alike(jobs, count):
    """Nothing is left; with one thread, and while all of them wait, no two clients' service differs by more than their largest pieces."""
    now_s, served, opened = [0.0], [], threading.Event()
    with contextlib.closing(SharedThreads(count, "t", lambda: now_s[0])) as threads:
        blocking = [submit(threads, f"block {i}", lambda: opened.wait(30)) for i in range(count)]

        def work(client, seconds):
            now_s[0] += seconds
            served.append((client, seconds))

        results = [submit(threads, client, lambda c=client, s=seconds: work(c, s), lasts) for client, seconds, lasts in jobs]
        opened.set()
        for result in (*blocking, *results):
            result.result(30)
    assert sorted(served) == sorted((client, seconds) for client, seconds, _ in jobs)
    if count > 1:
        return
    left = {client: sum(1 for name, *_ in jobs if name == client) for client in "abc"}
    totals = dict.fromkeys("abc", 0.0)
    largest = max((seconds for _, seconds, _ in jobs), default=0.0)
    for client, seconds in served:
        waiting = [name for name in "abc" if left[name]]
        if all(left[name] for name, *_ in jobs):
            assert max(totals[name] for name in waiting) - min(totals[name] for name in waiting) <= largest + 1e-6
        totals[client] += seconds
        left[client] -= 1
