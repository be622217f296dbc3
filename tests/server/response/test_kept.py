"""server/response/kept.py: the door that an id names is asked; `tests/tools/serve/test_doors.py` has doors that answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.texts import byte_codec

from npucompile.graphs.errors import RequestError
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.requests.items import ChatMessage
from npucompile.server.response import kept
from npucompile.server.siblings.caller import FOLLOW
from npucompile.server.storage.replay import KeptEvents
from npucompile.server.storage.store import StoredResponse

ITEMS = (ChatMessage("user", "a"),)


class Keeper:
    """A link that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def ask(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return b"there"

    async def follow(self, _: Any, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return None


class Reader:
    def __init__(self) -> None:
        self.read_events: list[Any] = []

    def read(self, events: Any, done: bool) -> None:
        self.read_events += [*events, done]

    def failed(self, error: Any) -> None:
        raise error


def service(keeper: Any = None) -> Service:
    made = Service(None, byte_codec(), ServedModel("m", 64, 256), limits=SocketLimits())  # type: ignore[arg-type]
    made.keeper = lambda name: keeper if name == "there" else None  # type: ignore[method-assign]
    replay = KeptEvents(1000)
    replay.append([{"sequence_number": 0}])
    made.store.put(StoredResponse("here", "me", ITEMS, b'{"id": "here"}', replay))
    return made


def test_what_is_kept_here_is_done_here_for_its_owner_alone() -> None:
    async def run() -> None:
        one, reader = service(), Reader()
        assert json.loads(await kept.body(one, "here", "me")) == {"id": "here"}
        assert await kept.cancel(one, "here", "me") == b'{"id": "here"}'
        assert await kept.conversation(one, "here", ("me",)) == ITEMS
        assert await kept.follow(one, reader, "here", "me", -1) is None
        assert reader.read_events == [{"sequence_number": 0}, True]
        for call in (kept.body, kept.cancel, kept.delete):
            with pytest.raises(RequestError, match="no response with id"):
                await call(one, "here", "other")
        # What another door asks is the same, and what it follows has ended.
        methods = kept.methods(one)
        assert methods[kept.BODY]("here", "me") == b'{"id": "here"}'
        methods[FOLLOW](reader, "here", "me", -1)()
        await kept.delete(one, "here", "me")
        with pytest.raises(RequestError, match="no response with id"):
            await kept.body(one, "here", "me")

    asyncio.run(run())


def test_what_another_door_keeps_is_asked_there() -> None:
    async def run() -> None:
        keeper = Keeper()
        one = service(keeper)
        assert await kept.body(one, "there", "me") == await kept.cancel(one, "there", "me") == b"there"
        await kept.delete(one, "there", "me")
        await kept.conversation(one, "there", ("me",))
        await kept.follow(one, Reader(), "there", "me", 3)
        assert [arguments[0] for arguments in keeper.asked] == [kept.BODY, kept.CANCEL, kept.DELETE, kept.CONVERSATION, "there"]
        assert keeper.asked[-1] == ("there", "me", 3)

    asyncio.run(run())
