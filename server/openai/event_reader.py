"""One HTTP connection that follows a response: what has come and has not been sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..engine.service import Service
from ..response.events import ServerEvent, in_lane
from ..storage.store import RunningResponse
from .live import MAX_WAITING, TooSlow


class EventReader:
    """A `response_run.Reader` whose events are taken; every method runs on the event loop.

    Args:
        max_waiting: events that may wait; None sets no bound, where the client gets all at the end.

    Attributes:
        ended: set with the last event.
        overflow: set when too much waits; it gets no more then.
    """

    def __init__(self, service: Service, max_waiting: int | None = MAX_WAITING) -> None:
        self.ended = asyncio.Event()
        self.overflow = asyncio.Event()
        self._service = service
        self._max_waiting = max_waiting
        self._waiting: list[ServerEvent] = []
        self._filled = asyncio.Event()
        self._error: Exception | None = None
        self._run: RunningResponse | None = None

    def follow(self, run: RunningResponse | None) -> None:
        """Names the run that it reads, which is left by `cancel`; None for one that has ended."""
        self._run = run

    def read(self, events: Sequence[ServerEvent], done: bool) -> None:
        """See `response_run.Reader`."""
        if self.overflow.is_set():
            return
        self._waiting += [in_lane(event, "") for event in events]
        if done:
            self.ended.set()
        if self._max_waiting is not None and len(self._waiting) > self._max_waiting:
            self._waiting = []
            self.overflow.set()
        if events or done:
            self._filled.set()

    def failed(self, error: Exception) -> None:
        """See `response_run.Reader`."""
        self._error = error
        self.ended.set()
        self._filled.set()

    async def take(self) -> list[ServerEvent]:
        """What has come since the last call, at least something; nothing when all has been taken.

        Raises:
            TooSlow: too much had come.
            Exception: the server failed to make the events.
        """
        if not self.ended.is_set():
            await self._filled.wait()
        if self.overflow.is_set():
            raise TooSlow
        if self._error is not None and not self._waiting:
            raise self._error
        self._filled.clear()
        events, self._waiting = self._waiting, []
        return events

    def cancel(self) -> None:
        """Leaves the response: nobody reads here any more."""
        if self._run is not None:
            self._service.cancel(*self._run.leave(self))
