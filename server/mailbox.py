"""Passes the engine's events to the event loop: one wake-up for all events of a step or of several short ones, whoever they are for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from operator import itemgetter
from threading import Lock
from typing import Any

from ..runtime.delivery import BatchSink
from ..runtime.request import Event, FinishEvent, TokenEvent, joined
from .bell import Bell
from .pace import Pace

log = logging.getLogger(__name__)

Deliver = Callable[[Event], None]

_request_id: Callable[[Any], str] = itemgetter(TokenEvent._fields.index("request_id"))
"""Of a TokenEvent."""


class Mailbox(BatchSink):
    """The sink of all requests of a server. `deliver` is called on any thread, all else on the loop.

    Events of a request reach its receiver in order. Those with tokens that are delivered together are one event, unless none may wait.
    The first token of a request and its end never wait, nor does what waits before them. A receiver that raises loses its own request
    and nothing else.

    Args:
        failed: called with the id of a request whose receiver raised.
        interval_s: how long tokens may wait for those of the next steps (see `Pace`); 0 leaves those of each step an event of its own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[str], None] = lambda _: None, interval_s: float = 0.0) -> None:
        self.loop = loop
        self._failed = failed
        self._joins = interval_s > 0
        self._receivers: dict[str, Deliver] = {}
        self._timer: asyncio.TimerHandle | None = None
        # What follows is guarded by the lock.
        self._silent: set[str] = set()
        self._events: list[Event] = []
        self._steps = 0
        self._rung = False
        self._pace = Pace(interval_s)
        self._lock = Lock()
        self._bell = Bell(loop, self._answer)

    def open(self, request_id: str, receiver: Deliver) -> None:
        """Names the receiver of a request's events; before the request is submitted."""
        self._receivers[request_id] = receiver
        with self._lock:
            self._silent.add(request_id)

    def close(self, request_id: str) -> None:
        """Delivers nothing of this request from now on."""
        self._receivers.pop(request_id, None)
        with self._lock:
            self._silent.discard(request_id)

    def deliver(self, events: Sequence[Event]) -> None:
        """Events of one step; dropped after the loop has closed."""
        with self._lock:
            self._events += events
            self._steps += 1
            rings = self._pace.arrived(self.loop.time(), urgent=self._urgent(events))
            if self._rung or not rings:
                return
            self._rung = True
        self._bell.ring()

    def _urgent(self, events: Sequence[Event]) -> bool:
        """Whether one of these is the end of a request, or its first token."""
        # For each event of each step: no loop of Python's.
        ends = FinishEvent in map(type, events)
        if not ends and (not self._silent or self._silent.isdisjoint(map(_request_id, events))):
            return False
        heard = [event.request_id for event in events if isinstance(event, FinishEvent) or event.token_ids]
        begins = not self._silent.isdisjoint(heard)
        self._silent.difference_update(heard)
        return ends or begins

    def _answer(self) -> None:
        with self._lock:
            self._rung = False
            events = self._take()
            timer_s = self._pace.taken(self.loop.time())
        self._set_timer(timer_s)
        self._pass_on(events)

    def _run_out(self) -> None:
        """The timer has run out."""
        events: Sequence[Event] = ()
        with self._lock:
            due, timer_s = self._pace.timer(self.loop.time())
            if due:
                events = self._take()
        self._set_timer(timer_s)
        self._pass_on(events)

    def _take(self) -> Sequence[Event]:
        """What waits, under the lock. A step has one event with tokens of a request at most."""
        events, steps = self._events, self._steps
        self._events, self._steps = [], 0
        try:
            return joined(events) if self._joins and steps > 1 else events
        except Exception:
            # Receivers take them one by one as well.
            log.exception("events of %d steps could not be joined", steps)
            return events

    def _set_timer(self, timer_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if timer_s is None else self.loop.call_at(timer_s, self._run_out)

    def _pass_on(self, events: Sequence[Event]) -> None:
        for event in events:
            receiver = self._receivers.get(event.request_id)
            if receiver is None:
                continue
            if isinstance(event, FinishEvent):
                del self._receivers[event.request_id]
            try:
                receiver(event)
            except Exception:
                log.exception("the receiver of %r raised on %s", event.request_id, type(event).__name__)
                self.close(event.request_id)
                self._failed(event.request_id)
