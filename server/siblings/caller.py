"""Another door, as the one that it asks has it: its questions are answered, and it follows responses that run here."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..requests.error_objects import error_reply
from .records import AnswerPart, Follow, Leave, SiblingQuestion, SiblingRefusal, Told

log = logging.getLogger(__name__)

Methods = Mapping[str, Callable[..., Any]]
"""What a door may be asked, by name: functions, some of them coroutines. `FOLLOW` is given a reader before its other arguments, and returns
what ends the following."""

FOLLOW = "follow"


class Caller:
    """Every method runs on the event loop.

    Args:
        send: of the channel to that door.
    """

    def __init__(self, send: Callable[[Any], None], methods: Methods) -> None:
        self._send, self._methods = send, methods
        self._readers: dict[int, _RemoteReader] = {}
        self._answering: set[asyncio.Task[None]] = set()

    def take(self, record: Any) -> None:
        """Does what a record asks for."""
        match record:
            case SiblingQuestion():
                self._answer(record)
            case Follow():
                self._follow(record)
            case Leave() if record.number in self._readers:
                self._readers.pop(record.number).leave()

    def gone(self) -> None:
        """The door has ended: it follows nothing any more."""
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.leave()

    def _answer(self, asked: SiblingQuestion) -> None:
        try:
            value = self._methods[asked.method](*asked.arguments)
        except Exception as error:
            self._refuse(asked, error)
            return
        if not inspect.iscoroutine(value):
            self._tell(asked, value)
            return

        async def wait() -> None:
            try:
                self._tell(asked, await value)
            except Exception as error:
                self._refuse(asked, error)

        task = asyncio.get_running_loop().create_task(wait())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _tell(self, asked: SiblingQuestion, value: Any) -> None:
        if asked.number is not None:
            self._send(Told(asked.number, value))

    def _refuse(self, asked: SiblingQuestion | Follow, error: Exception) -> None:
        reply = error_reply(error)
        if reply.status == 500:
            log.error("another door was not answered", exc_info=error)
        if asked.number is not None:
            self._send(SiblingRefusal(asked.number, reply))

    def _follow(self, asked: Follow) -> None:
        reader = _RemoteReader(asked.number, self._send, self._readers)
        # Before the events that it begins with: they may be all.
        self._readers[asked.number] = reader
        try:
            reader.leave = self._methods[FOLLOW](reader, *asked.arguments)
        except Exception as error:
            del self._readers[asked.number]
            self._refuse(asked, error)


class _RemoteReader:
    """A `storage.store.Reader` that follows a response for another door."""

    def __init__(self, number: int, send: Callable[[Any], None], readers: dict[int, _RemoteReader]) -> None:
        self._number, self._send, self._readers = number, send, readers
        self.leave: Callable[[], None] = lambda: None

    def read(self, events: Sequence[dict[str, Any]], done: bool) -> None:
        """See `Reader`."""
        self._send(AnswerPart(self._number, tuple(events), done))
        if done:
            self._readers.pop(self._number, None)

    def failed(self, error: Exception) -> None:
        """See `Reader`."""
        self._send(SiblingRefusal(self._number, error_reply(error)))
        self._readers.pop(self._number, None)
