"""One HTTP connection that follows a response: what has come and has not been sent yet."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.service import Service
from ..response.events import ServerEvent, in_lane
from ..storage.store import Followed
from .live import MAX_WAITING, Inbox


class EventReader(Inbox[ServerEvent]):
    """A `response.run.Reader` whose events are taken.

    Args:
        max_waiting: events that may wait; None sets no bound, where the client gets all at the end.
    """

    def __init__(self, service: Service, max_waiting: int | None = MAX_WAITING) -> None:
        super().__init__(service)
        self._max_waiting = max_waiting
        self._run: Followed | None = None

    def follow(self, run: Followed | None) -> None:
        """Names the run that it reads, which is left by `cancel`; None for one that has ended."""
        self._run = run

    def read(self, events: Sequence[ServerEvent], done: bool) -> None:
        """See `response.run.Reader`."""
        if self.overflow.is_set():
            return
        if done:
            self.ended.set()
        self._add([in_lane(event, "") for event in events], len(events), self._max_waiting)
        if done:
            self.wake()

    def cancel(self) -> None:
        """Leaves the response: nobody reads here any more."""
        if self._run is not None:
            self._service.cancel(*self._run.leave(self))
