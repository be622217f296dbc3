"""How many bytes of large bodies may be held at once: one body may be as large as its pictures, and there may be as many as connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..requests.error_objects import Refusal
from .tally import Tally

LARGEST = 4
"""Bodies of the largest legal size that there is room for at once."""

Grow = Callable[[int], None]
"""Says how large a body is by now; raises RequestError where there is no room for that."""


class BodyRoom:
    """Used on the event loop alone.

    Args:
        free_bytes: of a body that needs no room.
        tally: counts the bytes of bodies beyond these.
    """

    def __init__(self, free_bytes: int, tally: Tally | None = None) -> None:
        self._free_bytes, self._held = free_bytes, Tally() if tally is None else tally

    @property
    def held_bytes(self) -> int:
        """Of bodies, beyond what needs no room."""
        return self._held.total

    @contextlib.contextmanager
    def entered(self, max_bytes: int) -> Iterator[Grow]:
        """Room for a body, for the length of a `with`.

        Args:
            max_bytes: of the largest legal body.
        """
        taken, most = 0, LARGEST * max_bytes

        def grow(size_bytes: int) -> None:
            nonlocal taken
            more = max(0, size_bytes - self._free_bytes) - taken
            if more > 0 and self.held_bytes + more > most:
                raise Refusal("queue_full.bodies", held=self.held_bytes, most=most)
            taken += more
            self._held.add("", more)

        try:
            yield grow
        finally:
            self._held.add("", -taken)
