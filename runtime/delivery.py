"""Where the engine's events go: to a function for each, or to one place for all events of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .request import Event

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]


class BatchSink:
    """A sink that several requests share, and that takes all their events of a step in one call."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Events of one step, in order."""
        raise NotImplementedError

    def __call__(self, event: Event) -> None:
        """A single event."""
        self.deliver((event,))


def send(deliveries: Sequence[tuple[Sink, Event]]) -> list[Event]:
    """Gives each event to its sink; returns those whose sinks raised, which is logged."""
    batches: dict[BatchSink, list[Event]] = {}
    lost: list[Event] = []
    for sink, event in deliveries:
        if isinstance(sink, BatchSink):
            batches.setdefault(sink, []).append(event)
        else:
            lost += _call(lambda sink=sink, event=event: sink(event), (event,))  # type: ignore[misc]
    for batch_sink, events in batches.items():
        lost += _call(lambda sink=batch_sink, events=events: sink.deliver(events), events)  # type: ignore[misc]
    return lost


def _call(deliver: Callable[[], None], events: Sequence[Event]) -> Sequence[Event]:
    try:
        deliver()
    except Exception:
        names = sorted({event.request_id for event in events})
        log.exception("the sink of %s raised on %s", ", ".join(map(repr, names)), type(events[0]).__name__)
        return events
    return ()


class LiveRequest(NamedTuple):
    """A request that has not ended; `arrival` tells it from others that had or will have its id."""

    sink: Sink
    arrival: int
