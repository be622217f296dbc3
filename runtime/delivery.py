"""Where the engine's events go: to a function for each, or to one place for all events of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .request import Event

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]


class BatchSink:
    """A sink that several requests share, and that takes all their events of a step in one call.

    No abstract base class: each event of each step asks whether its sink is one, and of those that takes ten times as long.
    """

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
        lost += deliver(batch_sink, events)
    return lost


def deliver(sink: BatchSink, events: Sequence[Event]) -> Sequence[Event]:
    """Gives events to a sink; returns them if it raised, which is logged."""
    return _call(lambda: sink.deliver(events), events)


def _call(deliver: Callable[[], None], events: Sequence[Event]) -> Sequence[Event]:
    try:
        deliver()
    except Exception:
        names = sorted({event.request_id for event in events})
        log.exception("the sink of %s raised on %s", ", ".join(map(repr, names)), type(events[0]).__name__)
        return events
    return ()


class Live(NamedTuple):
    """A request that has not ended; `arrival` tells it from others that had or will have its id."""

    sink: Sink
    arrival: int


class Routes:
    """Remembers to which sink all events of a batch of requests go, since it is the same at every step."""

    def __init__(self) -> None:
        self._ids: tuple[str, ...] = ()
        self._live: Mapping[str, Live] = {}
        self._sink: BatchSink | None = None

    def shared(self, live: Mapping[str, Live], ids: tuple[str, ...]) -> BatchSink | None:
        """The sink that all these requests share; None where they have several, or one of them is not live.

        Args:
            live: the live requests by id; the same object as long as none of these ends.
            ids: the same object for the same requests.
        """
        if ids is not self._ids or live is not self._live:
            self._ids, self._live = ids, live
            first = live[ids[0]].sink if ids[0] in live else None
            shared = isinstance(first, BatchSink) and all(name in live and live[name].sink is first for name in ids)
            self._sink = first if shared and isinstance(first, BatchSink) else None
        return self._sink
