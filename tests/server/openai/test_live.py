"""server/openai/live.py: what waits for a client is bounded, and all of it comes in order."""

from __future__ import annotations

import asyncio

import pytest
from support.texts import RECORD, byte_codec

from npucompile.graphs.errors import RequestError
from npucompile.runtime.request import FinishEvent, Logprobs, Request, TokenEvent
from npucompile.server.engine.generation import Generation
from npucompile.server.openai.live import Live, TooSlow

REQUEST = Request("r", (1,), 9)
TOKEN = TokenEvent("r", byte_codec().encode("a"))
FINISH = FinishEvent("r", "length", 1, 9, RECORD)


class Service:
    """Delivers what the test sends."""

    def __init__(self):
        self.cancelled = []

    def submit(self, requests, deliver, client):
        if not requests[0].prompt:
            raise RequestError("no prompt")
        self.deliver = deliver

    def cancel(self, *request_ids):
        self.cancelled += request_ids

    def soon(self, call):
        asyncio.get_running_loop().call_soon(call)


def live(service, ended=None, stop=(), **bound):
    made = Live(service, [REQUEST], Generation([REQUEST], byte_codec(), stop), lambda: ended is not None and ended.append(1), **bound)
    made.start()
    return made


def test_all_comes_in_order_and_then_nothing():
    async def run():
        service, ended = Service(), []
        made = live(service, ended)
        for event in (TOKEN, TOKEN):
            service.deliver(event)
        assert [output.text for _, output in await made.take()] == ["a", "a"]
        waiting = asyncio.create_task(made.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        service.deliver(FINISH)
        assert [output.reason for _, output in await waiting] == ["length"]
        assert (await made.take(), ended, made.ended.is_set()) == ([], [1], True)
        made.cancel()
        assert service.cancelled == []

    asyncio.run(run())


def test_what_comes_of_a_step_while_the_taker_waits_is_handed_over_together():
    async def run():
        service, handed = Service(), []
        made = live(service)
        taking = asyncio.create_task(made.take(handed.append))
        await asyncio.sleep(0)
        for _ in range(2):
            service.deliver(TOKEN)
        assert handed == []
        await asyncio.sleep(0)
        assert [[output.text for _, output in outputs] for outputs in handed] == [["a", "a"]]
        # Who was handed something that it cannot do away with goes on itself, with what has come meanwhile.
        made.wake()
        service.deliver(TOKEN)
        assert [output.text for _, output in await taking] == ["a"]
        service.deliver(TOKEN)
        assert len(await made.take(handed.append)) == 1
        # The end comes with the last text.
        taking = asyncio.create_task(made.take(handed.append))
        await asyncio.sleep(0)
        service.deliver(TOKEN)
        service.deliver(FINISH)
        assert len(await taking) == 2
        assert await made.take(handed.append) == []
        assert len(handed) == 1

    asyncio.run(run())


def test_what_waits_to_be_handed_over_is_bounded():
    async def run():
        service, handed = Service(), []
        made = live(service, max_waiting=1)
        taking = asyncio.create_task(made.take(handed.append))
        await asyncio.sleep(0)
        for _ in range(2):
            service.deliver(TOKEN)
        await asyncio.sleep(0)
        assert made.overflow.is_set()
        assert handed == []
        taking.cancel()

    asyncio.run(run())


def test_a_stop_string_cancels():
    async def run():
        service = Service()
        live(service, stop=["a"])
        service.deliver(TOKEN)
        assert service.cancelled == ["r"]

    asyncio.run(run())


@pytest.mark.parametrize(("event", "fits"), [(TOKEN, 3), (TokenEvent("r", TOKEN.token_ids, (Logprobs(-1.0, ((1, -1.0),) * 2),)), 1)])
def test_what_waits_is_bounded(event, fits):
    async def run():
        service, ended = Service(), []
        made = live(service, ended, max_waiting=3)
        for _ in range(fits):
            service.deliver(event)
        assert not made.overflow.is_set()
        await made.take()
        for _ in range(fits + 1):
            service.deliver(event)
        assert made.overflow.is_set()
        assert service.cancelled == ["r"]
        service.deliver(event)
        service.deliver(FINISH)
        assert ended == [1]
        with pytest.raises(TooSlow):
            await made.take()

    asyncio.run(run())


def test_without_a_bound_all_waits():
    async def run():
        service = Service()
        made = live(service, max_waiting=None)
        for _ in range(10**4):
            service.deliver(TOKEN)
        assert len(await made.take()) == 10**4

    asyncio.run(run())
