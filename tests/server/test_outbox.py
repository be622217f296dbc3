"""server/outbox.py: what waits for a reader, in bytes and in time."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.outbox import BATCH_BYTES, RESUME_BYTES, Outbox


def play(script, **bounds):
    now = [0.0]

    async def run():
        await script(Outbox(**({"max_bytes": 10**7, "slow_reader_s": 10.0} | bounds), clock=lambda: now[0]), now)

    asyncio.run(run())


def test_frames_come_out_in_order_and_many_at_once():
    async def script(outbox, _):
        frames = [bytes([i]) * (BATCH_BYTES // 3) for i in range(7)]
        outbox.put(frames[:1])
        outbox.put(frames[1:])
        taken = []
        while sum(map(len, taken)) < len(frames):
            taken.append(await outbox.take())
        assert [frame for batch in taken for frame in batch] == frames
        assert [len(batch) for batch in taken] == [3, 3, 1]
        assert outbox.waiting_bytes == 0

    play(script)


def test_a_frame_larger_than_a_batch_goes_alone():
    async def script(outbox, _):
        outbox.put([b"x" * (2 * BATCH_BYTES), b"y"])
        assert [len(await outbox.take()), len(await outbox.take())] == [1, 1]

    play(script)


def test_a_reader_is_judged_by_how_far_behind_it_is_and_not_by_what_waits():
    async def script(outbox, now):
        for _ in range(100):
            outbox.put([b"x"] * 100)
            # A reader that keeps up, however much there is at once.
            while outbox.waiting_bytes:
                await outbox.take()
            now[0] += 9
            assert outbox.complaint() is None or outbox._sending_since_s is not None
            waiting = asyncio.create_task(outbox.take())
            await asyncio.sleep(0)
            now[0] += 1000
            assert outbox.complaint() is None
            waiting.cancel()
        outbox.put([b"x", b"y"])
        await outbox.take()
        now[0] += 9.9
        assert outbox.complaint() is None
        now[0] += 0.2
        assert "10 s behind" in outbox.complaint()

    play(script)


def test_what_waited_before_it_was_taken_counts():
    async def script(outbox, now):
        outbox.put([b"x" * BATCH_BYTES, b"y"])
        await outbox.take()
        now[0] += 8
        await outbox.take()
        assert outbox.complaint() is None
        now[0] += 3
        assert "behind" in outbox.complaint()

    play(script)


class Socket:
    """Takes frames while it is ready; what is taken otherwise is written later."""

    def __init__(self):
        self.open, self.written = True, []

    def ready(self):
        return self.open

    def write(self, frames):
        assert self.open
        self.written.append(frames)


def test_all_frames_of_a_turn_are_written_at_once_without_a_task():
    socket = Socket()

    async def script(outbox, _):
        outbox.put([b"a"])
        outbox.put([b"b", b"c"])
        assert (socket.written, outbox.waiting_bytes) == ([], 3)
        await asyncio.sleep(0)
        assert (socket.written, outbox.waiting_bytes) == ([[b"a", b"b", b"c"]], 0)

    play(script, writer=socket)


@given(st.lists(st.sampled_from(["put", "turn", "full", "free", "sent"]), max_size=40))
def test_frames_stay_in_order_whoever_writes_them(events):
    socket, put, busy = Socket(), itertools.count(), asyncio.Semaphore(0)

    async def script(outbox, _):
        async def write():
            while True:
                frames = await outbox.take()
                await busy.acquire()
                socket.written.append(frames)

        task = asyncio.create_task(write())
        for event in [*events, "free", *["sent", "turn", "turn"] * 45]:
            match event:
                case "put":
                    outbox.put([bytes([next(put)]), bytes([next(put)])])
                case "full" | "free":
                    socket.open = event == "free"
                case "sent":
                    busy.release()
                case "turn":
                    await asyncio.sleep(0)
        task.cancel()
        assert [frame[0] for frames in socket.written for frame in frames] == list(range(next(put)))
        assert outbox.waiting_bytes == 0

    play(script, writer=socket)


def test_too_many_bytes_are_too_many():
    async def script(outbox, _):
        outbox.put([b"x" * 60])
        assert outbox.complaint() is None
        outbox.put([b"x" * 60])
        assert outbox.complaint() == "120 bytes wait to be read; the limit is 100"

    play(script, max_bytes=100)


def test_no_more_is_read_of_a_client_to_which_much_waits_to_be_sent():
    async def script(outbox, _):
        await asyncio.wait_for(outbox.readable(), 1)
        outbox.put([b"x" * (RESUME_BYTES // 2)] * 3)
        reading = asyncio.create_task(outbox.readable())
        await asyncio.sleep(0)
        assert not reading.done()
        await outbox.take()
        await asyncio.wait_for(reading, 1)

    play(script)


def test_a_writer_that_fails_ends_the_one_who_takes():
    """Nobody knows what was sent, so nothing may follow it."""

    class Broken:
        ready = staticmethod(lambda: True)

        def write(self, frames):
            raise OSError("no socket")

    async def script(outbox, _):
        taker = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        outbox.put([b"x"])
        with pytest.raises(OSError, match="no socket"):
            await asyncio.wait_for(taker, 30)

    play(script, writer=Broken())
