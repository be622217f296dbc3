"""server/bell.py: a loop hears what another thread rings, and that thread keeps the interpreter's lock."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time

from npucompile.server.bell import Bell


def test_a_ring_from_another_thread_is_heard_on_the_loop():
    heard = []

    async def listen():
        rung = asyncio.Event()
        bell = Bell(asyncio.get_running_loop(), lambda: (heard.append(threading.get_ident()), rung.set()))
        for _ in range(3):
            rung.clear()
            thread = threading.Thread(target=bell.ring)
            thread.start()
            await asyncio.wait_for(rung.wait(), 60)
            thread.join()

    asyncio.run(listen())
    assert len(heard) == 3
    assert set(heard) == {threading.get_ident()}


def test_rings_that_nobody_has_heard_are_one():
    async def listen():
        heard = []
        bell = Bell(asyncio.get_running_loop(), lambda: heard.append(1))
        for _ in range(100):
            bell.ring()
        await asyncio.sleep(0.01)
        assert heard == [1]

    asyncio.run(listen())


def test_who_rings_keeps_the_lock():
    """A loop that takes it in between keeps the thread from its next step."""
    heard, seen = threading.Event(), []

    async def listen(ready):
        bell = Bell(asyncio.get_running_loop(), heard.set)
        ready.append(bell)
        while not heard.is_set():
            await asyncio.sleep(0.001)

    ready = []
    loop = threading.Thread(target=lambda: asyncio.run(listen(ready)))
    interval = sys.getswitchinterval()
    # So long that nobody has to give the lock up: what is seen of the loop was let in by the ring.
    sys.setswitchinterval(60)
    try:
        loop.start()
        while not ready:
            time.sleep(0.001)
        for _ in range(20):
            ready[0].ring()
            seen.append(heard.is_set())
    finally:
        sys.setswitchinterval(interval)
    loop.join()
    assert seen == [False] * 20


def test_its_files_are_closed_with_the_loop_and_a_ring_after_that_is_nothing():
    loop = asyncio.new_event_loop()
    bell = Bell(loop, lambda: None)
    pipe = os.fstat(bell._reader)
    assert len(open_ends(pipe)) == 2
    loop.close()
    bell.ring()
    del bell
    gc.collect()
    assert not open_ends(pipe)


def open_ends(pipe):
    """Descriptors of this process that are ends of one pipe."""
    ends = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # Closed since the list was made, perhaps the list's own.
            if os.path.samestat(os.fstat(int(name)), pipe):
                ends.append(name)
    return ends
