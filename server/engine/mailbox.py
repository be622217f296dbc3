"""Passes the engine's events to the event loop: one wake-up for all events of a step, whoever they are for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from threading import Lock

from ...runtime.delivery import BatchSink
from ...runtime.request import Event, FinishEvent

log = logging.getLogger(__name__)

Deliver = Callable[[Event], None]
Ended = Callable[[FinishEvent | None], None]


class Mailbox(BatchSink):
    """The sink of all requests of a server. `deliver` is called on any thread, all else on the loop.

    Events of a request reach its receivers in order. One that raises loses its own request and nothing else.

    Args:
        failed: called with the id of a request whose receiver raised.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[str], None] = lambda _: None) -> None:
        self.loop = loop
        self._failed = failed
        self._receivers: dict[str, tuple[Deliver, Ended]] = {}
        self._calls: list[Callable[[], None]] = []
        self._events: list[Event] = []
        # Guards the events.
        self._lock = Lock()

    def open(self, request_id: str, deliver: Deliver, ended: Ended) -> None:
        """Names the receivers of a request's events, before it is submitted.

        Args:
            deliver: gets all events but the last.
            ended: gets the last, or None when `deliver` raised.
        """
        self._receivers[request_id] = deliver, ended

    def close(self, request_id: str) -> None:
        """Delivers nothing of this request from now on."""
        self._receivers.pop(request_id, None)

    def soon(self, call: Callable[[], None]) -> None:
        """Calls it behind all events of the step, one turn of the loop for all that want it."""
        if not self._calls:
            self.loop.call_soon(self._call)
        self._calls.append(call)

    def _call(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:
                log.exception("what was to follow a step raised")

    def deliver(self, events: Sequence[Event]) -> None:
        """Events of one step; dropped after the loop has closed."""
        with self._lock:
            wakes = not self._events
            self._events += events
        if wakes:
            try:
                self.loop.call_soon_threadsafe(self._pass_on)
            except RuntimeError:
                self._events.clear()

    def _pass_on(self) -> None:
        with self._lock:
            events, self._events, receivers = self._events, [], self._receivers
        for event in events:
            if (receiver := receivers.get(event.request_id)) is None:
                continue
            deliver, ended = receiver
            try:
                if isinstance(event, FinishEvent):
                    del receivers[event.request_id]
                    ended(event)
                else:
                    deliver(event)
            except Exception:
                log.exception("the receiver of %r raised on %s", event.request_id, type(event).__name__)
                if receivers.pop(event.request_id, None):
                    ended(None)
                self._failed(event.request_id)
