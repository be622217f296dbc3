"""The requests that handovers have given to the engine of a decode server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...graphs.steps.prefill import PREFILL
from ..delivery import BatchSink, Sink
from ..request import RECEIVE, Event, FinishEvent, ParkedEvent, Request
from .open_rooms import HandoverEngine


class _Landed(NamedTuple):
    request: Request
    sink: Sink


class LandedRequests(BatchSink):
    """Takes the events of all requests of handovers, over whichever connection their pages came, and passes them on once they have landed.
    Its methods are called by the thread of rooms, but for `parked` and `deliver`.

    Args:
        engine: runs them.
        call: has the thread of rooms call a function.
        lost: told of a request that has lost its pages to others and is parked again with new ones.
        late: told how a request ended while it waited for pages; also of one that was given up, whose client knows nothing of this end.

    Attributes:
        local: whether the engine can compute prompts.
        count, seconds: of handovers, and from asking to landing.
        computed_here: requests that went on without one.
    """

    def __init__(
        self,
        engine: HandoverEngine,
        call: Callable[[Callable[[], None]], None],
        lost: Callable[[Request, Sink, ParkedEvent], None],
        late: Callable[[FinishEvent], None],
    ) -> None:
        self._engine, self._call, self._lost, self._late = engine, call, lost, late
        self.local = bool(PREFILL.among(engine.executor.buckets))
        self.count, self.seconds, self.computed_here = 0, 0.0, 0
        self._by_id: dict[str, _Landed] = {}

    def submit(self, request: Request, sink: Sink) -> None:
        """Runs a request of one token, before which nothing is to be computed.

        Raises:
            RequestError: the engine takes no requests.
        """
        self._by_id[request.id] = _Landed(request, sink)
        try:
            self._engine.submit(replace(request, handover=RECEIVE), self)
        except BaseException:
            del self._by_id[request.id]
            raise

    def landed(self, request: Request, sink: Sink, seconds: float) -> None:
        """The pages of a parked request have arrived."""
        self.count, self.seconds = self.count + 1, self.seconds + seconds
        self._begin(request, sink, filled=True)

    def compute_here(self, request: Request, sink: Sink) -> None:
        """The engine computes what nobody hands over to a parked request that had landed; no write to its pages is in flight."""
        self.computed_here += 1
        self._begin(request, sink, filled=False)

    def parked(self, event: ParkedEvent) -> bool:
        """A request has pages; returns whether it had landed, or is of one token. Called by the engine's thread."""
        if event.request_id not in self._by_id:
            return False
        if len(event.token_ids) == 1:
            self._engine.landed(event.request_id)
        else:
            self._call(functools.partial(self._lose, event))
        return True

    def deliver(self, events: Sequence[Event]) -> None:
        """Passes events of the engine on; called by its thread. Of a request that was given up the client has been told already."""
        by_sink: dict[int, tuple[Sink, list[Event]]] = {}
        for event in events:
            landed = self._by_id.get(event.request_id)
            if landed is not None:
                by_sink.setdefault(id(landed.sink), (landed.sink, []))[1].append(event)
                if isinstance(event, FinishEvent):
                    self._by_id.pop(event.request_id, None)
            elif isinstance(event, FinishEvent):
                self._call(functools.partial(self._late, event))
        for sink, own in by_sink.values():
            if isinstance(sink, BatchSink):
                sink.deliver(own)
            else:
                for event in own:
                    sink(event)

    def _lose(self, event: ParkedEvent) -> None:
        # One that has ended meanwhile is not here.
        if landed := self._by_id.pop(event.request_id, None):
            self._lost(landed.request, landed.sink, event)

    def _begin(self, request: Request, sink: Sink, *, filled: bool) -> None:
        self._by_id[request.id] = _Landed(request, sink)
        self._engine.landed(request.id, filled=filled)
