"""The engine of a server that runs in a process of its own: what the server asks of it goes to the process that steps."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from ...graphs.errors import NpucompileError, RequestError
from ...runtime import delivery
from ...runtime.delivery import Sink
from ...runtime.engine_host import Cancel, EngineAnswer, EngineQuestion, Events, Health, Submit
from ...runtime.executor import ExecutorFacts
from ...runtime.request import FinishEvent, Request
from ...runtime.scheduler.picture_admission import check_served
from ..grammar.compiler import GrammarConstraint

ANSWER_S = 5.0
"""How long a question may go unanswered: reading numbers takes a ms, beside a step that holds the interpreter some more."""

SILENCE_S = 5.0
"""How old news of the engine may be. It comes four times a second, unless the process that steps hangs."""


class RemoteEngine:
    """The interface of `service.EngineClient` over a channel. `take` is called by the thread that reads it, all else by any.

    Attributes:
        on_end: called with the FinishEvent of every request, after its sink.

    Args:
        send: puts a record into the channel.
        executor: what the engine serves.
    """

    def __init__(self, send: Callable[[Any], None], executor: ExecutorFacts) -> None:
        self.executor = executor
        self.on_end: Callable[[FinishEvent], None] = lambda _: None
        self._send = send
        self._numbers = itertools.count()
        self._health: Mapping[str, Any] = {"status": "starting"}
        self._heard_s = time.monotonic()
        # Guards all that follows.
        self._lock = threading.Lock()
        self._live: dict[str, Sink] = {}
        self._held: list[Request] | None = None
        self._answers: dict[int, tuple[threading.Event, list[Any]]] = {}

    def submit(self, request: Request, sink: Sink) -> None:
        """See `Engine.submit`.

        Raises:
            RequestError: the request can never be served, or its id is live; what the engine refuses besides is its FinishEvent.
        """
        check_served(request, self.executor)
        if isinstance(request.constraint, GrammarConstraint):
            # A matcher stays where it is; the process that steps makes its own.
            request = replace(request, constraint=cast(Any, request.constraint.source))
        with self._lock:
            if request.id in self._live:
                raise RequestError(f"id {request.id!r} is the id of a live request; legal is one that is not", param="id")
            self._live[request.id] = sink
            if self._held is None:
                self._send(Submit((request,)))
            else:
                self._held.append(request)

    def hold(self) -> None:
        """See `Engine.hold`: requests until `release` are one record."""
        with self._lock:
            self._held = self._held or []

    def release(self) -> None:
        """See `Engine.hold`."""
        with self._lock:
            held, self._held = self._held, None
            if held:
                self._send(Submit(tuple(held)))

    def cancel(self, *request_ids: str) -> bool:
        """See `Engine.cancel`."""
        with self._lock:
            live = tuple(name for name in request_ids if name in self._live)
            if self._held:
                self._send(Submit(tuple(self._held)))
                self._held = []
            if live:
                self._send(Cancel(live))
        return bool(live)

    def flush_prefix_cache(self) -> bool:
        """See `Engine.flush_prefix_cache`."""
        return bool(self._ask("flush_prefix_cache"))

    def stats(self) -> Mapping[str, Any]:
        """See `Engine.stats`."""
        return dict(self._ask("stats"))

    def health(self) -> Mapping[str, Any]:
        """What probes say: as the engine's process said last, or that it says nothing."""
        silent_s = time.monotonic() - self._heard_s
        if silent_s <= SILENCE_S:
            return self._health
        return {**self._health, "status": "stuck", "step_age_s": round(silent_s, 3)}

    def take(self, record: Any) -> None:
        """Takes what the engine's process sends."""
        if isinstance(record, Events):
            self._deliver(record)
        elif isinstance(record, Health):
            self._health, self._heard_s = record.state, time.monotonic()
        elif isinstance(record, EngineAnswer):
            with self._lock:
                waiting = self._answers.pop(record.number, None)
            if waiting:
                waiting[1].append(record.value)
                waiting[0].set()

    def _deliver(self, record: Events) -> None:
        events, live = record.events, self._live
        with self._lock:
            deliveries = [(sink, event) for event in events if (sink := live.get(event.request_id))]
            ends = [event for event in record.ends if live.pop(event.request_id, None)]
        if lost := delivery.send(deliveries):
            self.cancel(*{event.request_id for event in lost})
        for event in ends:
            self.on_end(event)

    def _ask(self, method: str) -> Any:
        answered, values = threading.Event(), list[Any]()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answered, values
            self._send(EngineQuestion(number, method))
        if not answered.wait(ANSWER_S):
            with self._lock:
                self._answers.pop(number, None)
            raise NpucompileError(f"the process that steps has not answered {method!r} within {ANSWER_S:g} s; it hangs, or has ended")
        return values[0]
