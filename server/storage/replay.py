"""Events of a response that were sent, kept so that a client that lost its connection can have them again."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from ..requests.error_objects import Refusal
from ..requests.frames import JSON, encode_bytes


class KeptEvents:
    """The last events of one response; the oldest are dropped first. They are kept as JSON, which takes a fraction of what objects do, and
    which the collector of garbage does not walk over.

    Args:
        max_bytes: of the kept events as JSON.

    Attributes:
        size_bytes: of the kept events as JSON.
        next: sequence number of the event that comes next.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self.next = 0
        self.size_bytes = 0

    def append(self, events: Sequence[dict[str, Any]]) -> None:
        """Adds events, whose sequence numbers follow those that were added before."""
        for event in events:
            self._events.append(encode_bytes(event, JSON))
            self.size_bytes += len(self._events[-1])
            self.next = event["sequence_number"] + 1
        while self.size_bytes > self._max_bytes:
            self.size_bytes -= len(self._events.popleft())

    def after(self, number: int) -> list[dict[str, Any]]:
        """The events behind a sequence number; behind -1, all.

        Raises:
            RequestError: some of them are not kept any more, or there is no such event.
        """
        first = self.next - len(self._events)
        if number >= self.next:
            raise Refusal("invalid_field.event", param="starting_after", number=number, most=self.next - 1)
        if number + 1 < first:
            raise Refusal("events_expired", param="starting_after", number=number, first=first, least=first - 1, most=self.next - 1)
        behind = itertools.islice(self._events, max(0, number + 1 - first), None)
        return [msgspec.json.decode(event) for event in behind]
