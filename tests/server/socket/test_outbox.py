"""server/socket/outbox.py: what waits for a reader, in bytes and in time."""

from __future__ import annotations

import asyncio

from npucompile.server.socket.outbox import BATCH_BYTES, RESUME_BYTES, Outbox


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
