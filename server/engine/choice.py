"""What a router has chosen for the requests of a body: their prefill server, and the rooms that join both servers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextvars import ContextVar


class RouterChoice:
    """What a router has chosen for the requests of a body.

    Args:
        place: of the prefill server: HOST:PORT, or HOST, or its id (`Hello.engine_id`).
        rooms: numbers by which the router told the prefill server of the requests.

    Attributes:
        field: of the body, for errors.
    """

    def __init__(self, place: str, rooms: Sequence[int], field: str) -> None:
        self.place, self.rooms, self.field = place, tuple(rooms), field
        self._next = itertools.cycle(self.rooms)

    def take(self) -> int:
        """The room of the next request; copies of a prompt share the rooms that there are."""
        return next(self._next)


chosen: ContextVar[RouterChoice | None] = ContextVar("chosen", default=None)
"""Of the HTTP request that is being answered, on a decode server."""
