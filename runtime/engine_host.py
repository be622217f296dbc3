"""An engine that another process asks: requests come in records, and the events of a step go back in one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..graphs.errors import NpucompileError, RequestError
from .channel import Channel
from .delivery import BatchSink
from .engine import Engine
from .engine_groups import EngineGroups
from .request import Event, ExecutionRecord, FinishEvent, Request, TokenEvent

log = logging.getLogger(__name__)

HEALTH_S = 0.25
"""How often the other process is told how the engine is."""


class Submit(NamedTuple):
    """Requests that begin together."""

    requests: tuple[Request, ...]


class Cancel(NamedTuple):
    """Ends requests."""

    request_ids: tuple[str, ...]


class EngineQuestion(NamedTuple):
    """A question by the name of an engine's method without arguments, and a number that its answer has."""

    number: int
    method: str


class EngineAnswer(NamedTuple):
    """The answer to the question of this number."""

    number: int
    value: Any


class Events(NamedTuple):
    """Of one step, by fields and not by events, which take four times as long to pickle.

    Attributes:
        columns: of each field of `TokenEvent` the values of all tokens' events; none where there are no tokens.
        ends: of requests; they come behind the tokens.
    """

    columns: tuple[tuple[Any, ...], ...]
    ends: tuple[FinishEvent, ...]

    @staticmethod
    def of(events: Sequence[Event]) -> Events:
        """The record of these events, of which the end of a request is the last."""
        ends = tuple(event for event in events if isinstance(event, FinishEvent))
        return Events(tuple(zip(*(event for event in events if isinstance(event, TokenEvent)), strict=True)), ends)

    @property
    def events(self) -> list[Event]:
        """They themselves."""
        return [*map(partial(tuple.__new__, TokenEvent), zip(*self.columns, strict=True)), *self.ends]


class Health(NamedTuple):
    """How the engine is, as probes say it."""

    state: Mapping[str, Any]


class Revive(Protocol):
    """Makes a request whole whose constraint was left behind as a text."""

    def __call__(self, request: Request, /) -> Request:
        """Raises RequestError where it cannot be."""


class EngineHost(BatchSink):
    """Serves one other process; its requests are told from those of others by their ids.

    Args:
        health: what probes say of the engine.
        revive: applied to every request.
    """

    def __init__(self, engine: Engine | EngineGroups, channel: Channel, health: Callable[[], Mapping[str, Any]], revive: Revive) -> None:
        self._engine, self._channel, self._health, self._revive = engine, channel, health, revive
        self._live: set[str] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._tell, name="npucompile-health", daemon=True).start()

    def take(self, record: Any) -> None:
        """Does what a record asks for."""
        if isinstance(record, Submit):
            self._engine.hold()
            for request in record.requests:
                self._submit(request)
            self._engine.release()
        elif isinstance(record, Cancel):
            self._engine.cancel(*record.request_ids)
        elif isinstance(record, EngineQuestion):
            self._channel.send(EngineAnswer(record.number, getattr(self._engine, record.method)()))

    def deliver(self, events: Sequence[Event]) -> None:
        """Sends the events of a step."""
        record = Events.of(events)
        if record.ends:
            with self._lock:
                self._live.difference_update(end.request_id for end in record.ends)
        self._channel.send(record)

    def close(self) -> None:
        """Cancels what the other process has submitted: nobody waits for it any more."""
        self._closed.set()
        with self._lock:
            live = tuple(self._live)
        self._engine.cancel(*live)

    def _submit(self, request: Request) -> None:
        with self._lock:
            self._live.add(request.id)
        try:
            self._engine.submit(self._revive(request), self)
        except Exception as error:
            # The other process has checked it; the engine is stopping, or its state is not what that process knows.
            if not isinstance(error, NpucompileError):
                log.exception("request %s was not submitted", request.id)
            code = error.code if isinstance(error, RequestError) else None
            end = FinishEvent(request.id, "error", len(request.prompt), 0, ExecutionRecord(), str(error), code=code)
            self.deliver((end,))

    def _tell(self) -> None:
        while not self._closed.is_set():
            self._channel.send(Health(self._health()))
            self._closed.wait(HEALTH_S)
