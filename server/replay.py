"""Events of a response that were sent, kept so that a client that lost its connection can have them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..graphs.errors import RequestError
from .events import ServerEvent
from .frames import JSON, encode_bytes


class Replay:
    """The last events of one response; the oldest are dropped first.

    Args:
        max_bytes: of the kept events as JSON.

    Attributes:
        size_bytes: of the kept events as JSON.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: deque[tuple[ServerEvent, int]] = deque()
        self._next = 0
        self.size_bytes = 0

    def append(self, events: Sequence[ServerEvent]) -> None:
        """Adds events, whose sequence numbers follow those that were added before."""
        for event in events:
            size = len(encode_bytes(event, JSON))
            self._events.append((event, size))
            self.size_bytes += size
            self._next = event["sequence_number"] + 1
        while self.size_bytes > self._max_bytes:
            self.size_bytes -= self._events.popleft()[1]

    def after(self, number: int) -> list[ServerEvent]:
        """The events behind a sequence number; behind -1, all.

        Raises:
            RequestError: some of them are not kept any more, or there is no such event.
        """
        first = self._next - len(self._events)
        if number >= self._next:
            message = f"starting_after is {number}; the response has events 0 to {self._next - 1}"
            raise RequestError(message, param="starting_after", code="invalid_field")
        if number + 1 < first:
            message = f"starting_after is {number}, and events are kept from {first} on; legal are {first - 1} to {self._next - 1}"
            raise RequestError(message, param="starting_after", code="events_expired")
        return [event for event, _ in self._events if event["sequence_number"] > number]
