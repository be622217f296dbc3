"""Counts for clients what their requests take of a processor before the engine has them, and does it beside the event loop where it is
long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from ..requests.shared_threads import SharedThreads
from .refusals import Refusals

POLL_S = 0.1
SERVERS_OWN = 500
"""Statuses from here on are not of what a client has sent."""

LARGE_BYTES = 2**16
"""A body above it waits for its client's turn before it is parsed, as what is done on a thread does."""

THREADS = SharedThreads(6, "npucompile-requests")
"""As many as asyncio has on two processors; most of what they do holds Python's lock."""

T = TypeVar("T")


class GuardedWork:
    """What a request takes before it is admitted, or a websocket's message; used on the event loop alone.

    Args:
        refusals: that count it, until it is admitted.
        client: whose it is.
    """

    def __init__(self, refusals: Refusals, client: str) -> None:
        self._refusals, self._client, self._seconds = refusals, client, 0.0

    async def turn(self) -> None:
        """Waits until the work of the client's refusals is paid off."""
        while (owed_s := self._refusals.owed_s(self._client, self._seconds)) > 0:
            await asyncio.sleep(min(owed_s, POLL_S))

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what the body of a `with` takes, which waits for nothing."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.add(time.thread_time() - began_s)

    def add(self, seconds: float) -> None:
        """Counts seconds of a processor."""
        self._seconds += seconds
        self._refusals.charge(self._client, seconds)

    def admitted(self) -> None:
        """None of it was for a refusal."""
        self.add(-self._seconds)

    def refused(self, status: int) -> float:
        """It was; for how many seconds the refusal is delayed, by those before it. One that says what the server has no room for, or cannot
        do, is none of its client's doing."""
        if status >= SERVERS_OWN:
            self.admitted()
        own_s, self._seconds = self._seconds, 0.0
        return self._refusals.wait_s(self._client, own_s)


work: ContextVar[GuardedWork] = ContextVar("npucompile_work", default=GuardedWork(Refusals(None, time.monotonic), ""))  # noqa: B039
"""Of the request that is handled; tasks that it starts inherit it."""


async def off_loop(takes_long: bool, prepare: Callable[[], T]) -> T:
    """The result of work for one request, done on a thread if it takes long, once it is its client's turn."""
    own = work.get()
    if not takes_long:
        with own.counted():
            return prepare()
    await own.turn()
    seconds = 0.0

    def timed() -> T:
        nonlocal seconds
        began_s = time.thread_time()
        try:
            return prepare()
        finally:
            seconds = time.thread_time() - began_s

    try:
        return await asyncio.wrap_future(THREADS.submit(timed))
    finally:
        own.add(seconds)
