"""Who may write to the pools of a decode server, and how that is taken back from a writer of which nothing is heard any more.

A transfer engine cannot revoke what it was told of: bytes that a stopped process has begun to send are written whenever it goes on, also
after the memory was unregistered (Mooncake over tcp, measured). So the memory is opened again: the engine is closed with all of its
connections, another one takes its place under another session, and only then are the pages of the lost writer used again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

from .lease import LEASE_S

log = logging.getLogger(__name__)

QUIET_S = 2.0
"""How long other writers may go on before their connections are closed too; their rooms fail, and prompts are computed elsewhere."""

AGAIN_S = 5.0
"""Before another attempt to open the memory, where that has failed. Nothing can be written meanwhile."""


class Reopened(Protocol):
    """The part of `Pools` that this is about."""

    def reopen(self, done: Callable[[str], None]) -> None:
        """See `Pools`."""
        ...


class WriteAccess:
    """All methods are called by the thread of the rooms.

    Args:
        call: has that thread call a function.
        clock: monotonic seconds.
        reopened: called when the memory is open under other sessions, before anything else is granted.

    Attributes:
        revoked: how often the memory was opened again.
    """

    def __init__(
        self,
        pools: Reopened,
        call: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        reopened: Callable[[], None] = lambda: None,
    ) -> None:
        self._pools, self._call, self._clock, self._reopened = pools, call, clock, reopened
        # Rooms that were told the present session, and those that wait for the next one.
        self._writers: set[Hashable] = set()
        self._queued: dict[Hashable, Callable[[], None]] = {}
        # What is called when the memory was opened again, and whether that is under way; then, when a lease is over.
        self._lost: list[_Freed] = []
        self._opening = self._closed = False
        self._freed: list[_Freed] = []
        self._next_s = math.inf
        self.revoked = 0

    def grant(self, room: Hashable, send: Callable[[], None]) -> None:
        """Has `send` tell a writer where to write: at once, or when the memory was opened again."""
        if self._lost:
            self._queued[room] = send
        else:
            self._writers.add(room)
            send()

    def release(self, room: Hashable) -> None:
        """No write of this room is in flight, or will be."""
        self._writers.discard(room)
        self._queued.pop(room, None)
        self.tick()

    def revoke(self, room: Hashable, done: Callable[[], None]) -> None:
        """Calls `done` once nothing that was granted to a room can be written."""
        if self._queued.pop(room, None):
            # It was never told where.
            self._call(done)
            return
        self._writers.discard(room)
        if not self._lost:
            self._next_s = self._clock() + QUIET_S
        self._lost.append(_Freed(self._clock() + LEASE_S, done))
        self.tick()

    def tick(self) -> None:
        """Opens the memory again when it is time, and lets pages go."""
        now_s = self._clock()
        if self._lost and not self._opening and (now_s >= self._next_s or not (self._writers or self._closed)):
            # Whoever writes still has the old session, whose connections are closed.
            self._writers.clear()
            self._opening = True
            self._pools.reopen(lambda reason: self._call(lambda: self._opened(reason)))
        due = [freed.done for freed in self._freed if freed.at_s <= now_s]
        self._freed = [freed for freed in self._freed if freed.at_s > now_s]
        for done in due:
            done()

    def _opened(self, reason: str) -> None:
        self._opening, self._closed = False, bool(reason)
        if reason:
            log.warning("the memory of this server was closed to writers, and cannot be opened again yet: %s", reason)
            self._next_s = self._clock() + AGAIN_S
            return
        # Also those that were lost meanwhile: they had the old session.
        self._freed += self._lost
        self._lost = []
        self.revoked += 1
        self._reopened()
        queued, self._queued = self._queued, {}
        for room, send in queued.items():
            self.grant(room, send)
        self.tick()


class _Freed(NamedTuple):
    at_s: float
    done: Callable[[], None]
