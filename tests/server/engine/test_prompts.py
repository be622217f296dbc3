"""server/engine/prompts.py: tokens of pictures hold places before a pixel is decoded, and give them back."""

from __future__ import annotations

import asyncio

import pytest
from support.scripted import ManualEngine
from support.shown import FORM, IMAGE_ID, SHOWING, VISION, codec, url

from npucompile.graphs.errors import RequestError
from npucompile.server.chat.template import Chat
from npucompile.server.engine.prompts import prompt_of, reading, rendered
from npucompile.server.engine.service import Service
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.pictures.decoding import decode
from npucompile.server.requests.pictures import PicturePart, data_of


class Taken:
    """Reads pictures whose counts are known, and waits before it decodes one."""

    vision = VISION

    def __init__(self):
        self.waits, self.decoding = asyncio.Event(), 0

    async def counts(self, parts, fields):
        return (6,) * len(parts)

    async def pictures(self, parts, fields):
        self.decoding += 1
        await self.waits.wait()
        return tuple(VISION.processor.picture(decode(data_of(part.url, part.param, 10**6))) for part in parts)


def service(taken, **limits):
    return Service(ManualEngine(), codec(), SHOWING, chat=FORM, limits=SocketLimits(**limits), pictures=taken)


def test_tokens_hold_places_until_the_request_is_ready():
    async def run():
        taken = Taken()
        one = service(taken, max_queued_tokens=20)
        parts = [PicturePart(url(), "p")]

        async def read():
            async with reading(one, parts, None, "me", 2) as pictures:
                return len(pictures), one.admission.live_tokens

        first = asyncio.create_task(read())
        while not taken.decoding:
            await asyncio.sleep(0)
        assert (one.admission.live, one.admission.live_tokens) == (2, 12)
        with pytest.raises(RequestError) as caught:
            await read()
        assert (caught.value.code, taken.decoding) == ("queue_full", 1)
        taken.waits.set()
        assert await first == (1, 12)
        assert (one.admission.live, one.admission.live_tokens) == (0, 0)

    asyncio.run(run())


def test_a_chat_with_pictures_is_a_prompt_with_spans():
    async def run():
        one = service(Taken())
        picture = VISION.processor.picture(decode(data_of(url(), "p", 10**6)))
        chat = Chat([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}])
        prompt = prompt_of(one, chat, [picture], "messages")
        assert (prompt.text, prompt.token_ids) == rendered(one, chat, [6], "messages")
        (shown,) = prompt.pictures
        assert [i for i, token in enumerate(prompt.token_ids) if token == IMAGE_ID] == [*range(shown.span.first, shown.span.end)]
        with pytest.raises(RequestError, match="1 places for pictures"):
            rendered(one, chat, [], "messages")
        with pytest.raises(RequestError) as caught:
            rendered(one, chat, [5000], "messages")
        assert caught.value.code == "context_length_exceeded"
        assert len(rendered(one, chat, [5000], "messages", bounded=False)[1]) > 5000

    asyncio.run(run())
