"""The other doors of a server together: who keeps a response, what all hold of what limits are of, and whether all serve."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from ...graphs.errors import RequestError
from ...runtime.channel import Channel
from ..guard.tally import Tally
from .caller import Caller, Methods
from .ids import door_of, new_response_id
from .link import Link
from .records import Held, Place

log = logging.getLogger(__name__)

TELL_S = 0.01
"""How long what this door holds may have changed before the others hear of it."""


def user_of(connection: Connection) -> int:
    """The user of the process at the other end (SO_PEERCRED of socket(7))."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return int(struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1])


class Siblings:
    """Every method but `start` and `close` runs on the event loop.

    Args:
        loop: of the server.
        methods: what other doors may ask this one.
        tallies: of what limits are of, by name.
    """

    def __init__(self, place: Place, loop: asyncio.AbstractEventLoop, methods: Methods, tallies: Mapping[str, Tally]) -> None:
        self._place, self._loop, self._tallies = place, loop, tallies
        self._methods = methods
        self._links = {door: Link(door, loop, self._introduce) for door in range(place.doors) if door != place.number}
        self._channels: set[Channel] = set()
        self._listener: Listener | None = None
        self._telling = self._closed = False
        for tally in tallies.values():
            tally.on_change = self._changed

    @property
    def complete(self) -> bool:
        """Whether all others serve."""
        return all(link.connected for link in self._links.values())

    @property
    def following(self) -> int:
        """Responses of other doors that are followed here."""
        return sum(link.following for link in self._links.values())

    def new_response_id(self) -> str:
        """An identifier no other response has."""
        return new_response_id(self._place.number)

    def keeper(self, response_id: str) -> Link | None:
        """The other door that keeps a response, if one does."""
        return self._links.get(-1 if (door := door_of(response_id)) is None else door)

    async def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all others that serve."""
        asked = [link.ask(method, *arguments) for link in self._links.values() if link.connected]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        # One that ends meanwhile has nothing to say any more.
        return [answer for answer in answers if not isinstance(answer, RequestError)]

    def start(self) -> None:
        """Lets the others ask, and asks them from now on."""
        self._listener = listener = Listener(self._place.address(self._place.number), "AF_UNIX", len(self._links))
        calls: list[Callable[[], None]] = [partial(self._accept, listener)]
        calls += [partial(link.connect, self._place.address(door), self._place.key) for door, link in self._links.items()]
        for call in calls:
            threading.Thread(target=call, name="npucompile-siblings", daemon=True).start()

    def close(self) -> None:
        """Writes what was sent to the others, who find this door ended."""
        self._closed = True
        if self._listener:
            self._listener.close()
        for channel in tuple(self._channels):
            channel.close()
        for link in self._links.values():
            link.close()

    def _accept(self, listener: Listener) -> None:
        while not self._closed:
            try:
                connection = listener.accept()
                if self._closed or user_of(connection) != os.getuid():
                    # Anybody may connect; who is not asked for the key cannot let others wait by not answering.
                    connection.close()
                    continue
                deliver_challenge(connection, self._place.key)
                answer_challenge(connection, self._place.key)
                self._serve(connection)
            except AuthenticationError:
                log.error("a process without the key of the doors has asked one of them")
            except (OSError, EOFError):
                # A door that has ended between two words.
                continue

    def _serve(self, connection: Connection) -> None:
        """Answers another door; what it holds is forgotten when it ends."""
        doors = set[int]()

        def take(record: Any) -> None:
            if not isinstance(record, Held):
                caller.take(record)
                return
            doors.add(record.door)
            for name, counts in record.counts.items():
                self._tallies[name].hear(record.door, counts)

        def end() -> None:
            self._channels.discard(channel)
            caller.gone()
            for tally in self._tallies.values():
                for door in doors:
                    tally.forget(door)

        def soon(call: Any, *arguments: Any) -> None:
            # The loop has ended where this process ends.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *arguments)

        channel = Channel(connection, lambda record: soon(take, record), lambda: soon(end))
        caller = Caller(channel.send, self._methods)
        channel.start()
        self._channels.add(channel)

    def _introduce(self, link: Link) -> None:
        link.send(Held(self._place.number, {name: tally.held() for name, tally in self._tallies.items()}))

    def _changed(self) -> None:
        if not self._telling:
            self._telling = True
            self._loop.call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._telling = False
        changes = Held(self._place.number, {name: tally.changes() for name, tally in self._tallies.items()})
        for link in self._links.values():
            link.send(changes)
