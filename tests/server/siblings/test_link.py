"""server/siblings/link.py: questions, refusals and responses that are followed, between two doors of one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.guard.tally import Tally
from npucompile.server.requests.error_objects import Refusal
from npucompile.server.siblings.caller import FOLLOW
from npucompile.server.siblings.link import CANCEL, Link
from npucompile.server.siblings.records import Place
from npucompile.server.siblings.siblings import Siblings

KEEPER = "resp_01" + "0" * 30
"""An id of door 1."""


class Reader:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.done, self.error = False, None

    def read(self, events: Any, done: bool) -> None:
        self.events += events
        self.done = done

    def failed(self, error: Any) -> None:
        self.error = error


class Kept:
    """What door 1 answers."""

    def __init__(self) -> None:
        self.reader: Any = None
        self.left = self.cancelled = 0

    def methods(self) -> dict[str, Callable[..., Any]]:
        async def slowly(value: int) -> int:
            await asyncio.sleep(0.01)
            return value + 1

        def refuse() -> None:
            raise Refusal("draining")

        def fault() -> None:
            raise ValueError("a fault")

        return {"slowly": slowly, "refuse": refuse, "fault": fault, FOLLOW: self.follow, CANCEL: self.cancel}

    def follow(self, reader: Any, response_id: str, after: int) -> Callable[[], None]:
        if response_id != KEEPER:
            raise Refusal("response_not_found", response=response_id)
        self.reader = reader
        reader.read([{"number": after}], False)

        def leave() -> None:
            self.left += 1

        return leave

    def cancel(self, response_id: str, after: int) -> None:
        self.cancelled += 1
        self.reader.read([{"number": after + 1}], True)


@asynccontextmanager
async def doors(folder: Path, kept: Kept, tallies: tuple[Tally, Tally] | None = None) -> AsyncIterator[tuple[Siblings, Siblings]]:
    """Two doors, of which door 0 asks."""
    loop, held = asyncio.get_running_loop(), tallies or (Tally(), Tally())
    pair = tuple(
        Siblings(Place(number, 2, str(folder), b"key"), loop, kept.methods() if number else {}, {"requests": held[number]})
        for number in (0, 1)
    )
    for door in pair:
        door.start()
    for _ in range(100):
        if all(door.complete for door in pair):
            break
        await asyncio.sleep(0.02)
    yield pair[0], pair[1]
    for door in pair:
        await asyncio.to_thread(door.close)


async def until(true: Callable[[], object]) -> None:
    for _ in range(200):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not come true within 2 s")


def link_of(door: Siblings) -> Link:
    link = door.keeper(KEEPER)
    assert link is not None
    return link


def test_questions_are_answered_and_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with doors(tmp_path, Kept()) as (door, _):
            link = link_of(door)
            assert await asyncio.gather(*(link.ask("slowly", value) for value in range(5))) == [1, 2, 3, 4, 5]
            with pytest.raises(RequestError, match="ending and takes no new") as caught:
                await link.ask("refuse")
            assert caught.value.code == "draining"
            # A fault is logged where it happens, and told without detail.
            with pytest.raises(RequestError, match="its log has the reason"):
                await link.ask("fault")

    asyncio.run(ask())
    assert "a fault" in caplog.text


def test_a_response_is_followed_left_and_cancelled(tmp_path: Path) -> None:
    async def follow() -> None:
        kept, reader = Kept(), Reader()
        async with doors(tmp_path, kept) as (door, _):
            link = link_of(door)
            following = await link.follow(reader, KEEPER, 7)
            assert (reader.events, reader.done, door.following) == ([{"number": 7}], False, 1)
            assert following.leave(reader) == ()
            await until(lambda: kept.left == 1)
            assert door.following == 0
            other = Reader()
            following = await link.follow(other, KEEPER, 3)
            following.cancel()
            await until(lambda: other.done)
            assert other.events == [{"number": 3}, {"number": 4}]
            assert (kept.left, kept.cancelled, door.following) == (1, 1, 0)
            failing = Reader()
            await link.follow(failing, KEEPER, 0)
            kept.reader.failed(ValueError("a fault"))
            await until(lambda: failing.error)
            with pytest.raises(RequestError, match="no response with id"):
                await link.follow(Reader(), "resp_02", 0)
            assert door.following == 0

    asyncio.run(follow())
