"""Another door, as the one that asks it has it: questions, and responses that are followed there."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

from ...runtime.channel import Channel
from ..requests.error_objects import Refusal, Relayed
from ..storage.store import Reader
from .records import AnswerPart, Follow, Leave, SiblingQuestion, SiblingRefusal, Told

RETRY_S = 0.05
"""Between attempts to reach a door that does not listen: it starts."""

CANCEL = "cancel"
"""Method that ends a response: of an id and an owner, as FOLLOW's first arguments are."""

UP_S = 2.0
"""How long a question waits for a door that starts."""


class Link:
    """Connected as long as the other door serves; all but `connect` runs on the event loop.

    Args:
        door: its number.
        on_up: called when it is there, or is there again.
    """

    def __init__(self, door: int, loop: asyncio.AbstractEventLoop, on_up: Callable[[Link], None]) -> None:
        self.door, self._loop, self._on_up = door, loop, on_up
        self._up = asyncio.Event()
        self._channel: Channel | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._followed: dict[int, Reader] = {}

    @property
    def connected(self) -> bool:
        """Whether the other door serves."""
        return self._up.is_set()

    @property
    def following(self) -> int:
        """Responses that are followed there."""
        return len(self._followed)

    def connect(self, address: str, key: bytes) -> None:
        """Connects, and again whenever the other door has ended; on a thread of its own, until `close`."""
        while not self._closed:
            try:
                connection = Client(address, "AF_UNIX", key)
            except (OSError, EOFError, AuthenticationError):
                time.sleep(RETRY_S)
                continue
            ended = threading.Event()
            channel = Channel(connection, lambda record: self._soon(self._take, record), ended.set)
            channel.start()
            self._soon(self._came, channel)
            ended.wait()
            self._soon(self._went)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """The answer to a question.

        Raises:
            RequestError: the other door refuses, or is not there.
        """
        await self._wait()
        number, answer = self._expect()
        self.send(SiblingQuestion(number, method, arguments))
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    async def follow(self, reader: Reader, *arguments: Any) -> Following:
        """Has the reader get the events of a response of the other door, from now on; the first have come when this returns.

        Raises:
            RequestError: as `ask`.
        """
        await self._wait()
        number, begun = self._expect()
        self._followed[number] = reader
        self.send(Follow(number, arguments))
        try:
            await begun
        except BaseException:
            self.leave(number)
            raise
        finally:
            self._asked.pop(number, None)
        return Following(self, number, arguments)

    def leave(self, number: int) -> None:
        """A reader gets no more."""
        if self._followed.pop(number, None):
            self.send(Leave(number))

    def close(self) -> None:
        """Writes what was sent, and connects no more."""
        self._closed = True
        if self._channel:
            self._channel.close()

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._up.wait(), UP_S)
        if not self.connected:
            raise Refusal("not_ready.door")

    def _expect(self) -> tuple[int, asyncio.Future[Any]]:
        number, answer = next(self._numbers), self._loop.create_future()
        self._asked[number] = answer
        return number, answer

    def send(self, record: Any) -> None:
        """Sends a record; nothing where the other door is not there."""
        if self._channel:
            self._channel.send(record)

    def _soon(self, call: Callable[..., None], *arguments: Any) -> None:
        # The loop has ended where this process ends.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def _came(self, channel: Channel) -> None:
        self._channel = channel
        self._up.set()
        self._on_up(self)

    def _went(self) -> None:
        self._channel = None
        self._up.clear()
        for number in [*self._asked, *self._followed]:
            self._fail(number, Refusal("not_ready.door"))

    def _take(self, record: Any) -> None:
        match record:
            case Told():
                self._settle(record.number, record.value)
            case AnswerPart():
                self._settle(record.number, None)
                reader = self._followed.get(record.number)
                if record.done:
                    self._followed.pop(record.number, None)
                if reader:
                    reader.read(record.events, record.done)
            case SiblingRefusal():
                self._fail(record.number, Relayed(record.reply))

    def _settle(self, number: int, value: Any) -> None:
        answer = self._asked.get(number)
        if answer and not answer.done():
            answer.set_result(value)

    def _fail(self, number: int, error: Exception) -> None:
        reader, answer = self._followed.pop(number, None), self._asked.get(number)
        if answer and not answer.done():
            # A reader that has nothing yet is told by who waits for its first events.
            answer.set_exception(error)
        elif reader:
            reader.failed(error)


class Following:
    """A response of another door that one reader follows: a `storage.store.Followed`.

    Args:
        arguments: that it was asked for with.
    """

    def __init__(self, link: Link, number: int, arguments: tuple[Any, ...]) -> None:
        self._link, self._number, self._arguments = link, number, arguments

    def cancel(self) -> None:
        """Ends it, whoever reads it; its last events come."""
        self._link.send(SiblingQuestion(None, CANCEL, self._arguments[:2]))

    def leave(self, _: Reader) -> tuple[str, ...]:
        """The other door cancels what nobody waits for; nothing is to be cancelled here."""
        self._link.leave(self._number)
        return ()
