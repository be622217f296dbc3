"""server/openai/event_reader.py: events wait for one connection, and no more of them than may."""

from __future__ import annotations

import asyncio

import pytest

from npucompile.server.openai.event_reader import EventReader
from npucompile.server.openai.live import TooSlow


def events(*numbers):
    return [{"type": "x", "sequence_number": number, "stream_id": "a"} for number in numbers]


def test_events_are_taken_once_and_have_no_lane():
    async def play():
        reader = EventReader(None)
        reader.read(events(0, 1), False)
        assert await reader.take() == [{"type": "x", "sequence_number": number} for number in (0, 1)]
        waiting = asyncio.create_task(reader.take())
        await asyncio.sleep(0)
        # Nothing is no end.
        reader.read([], False)
        await asyncio.sleep(0)
        assert not waiting.done()
        reader.read(events(2), True)
        assert [event["sequence_number"] for event in await waiting] == [2]
        assert (await reader.take(), reader.ended.is_set()) == ([], True)

    asyncio.run(play())


def test_too_many_are_dropped_and_told():
    async def play():
        reader = EventReader(None, max_waiting=2)
        reader.read(events(0, 1, 2), False)
        reader.read(events(3), True)
        assert reader.overflow.is_set()
        with pytest.raises(TooSlow):
            await reader.take()

    asyncio.run(play())
