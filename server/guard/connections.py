"""Counts the connections of each peer and of all, from their first byte to their last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ...graphs.errors import RequestError


class Connections:
    """Open connections; used on the event loop alone.

    Args:
        most: how many may be open at once now, of all and of one address.
    """

    def __init__(self, most: Callable[[], tuple[int, int]]) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Connections open now."""
        return self._open.total()

    def enter(self, peer: str) -> None:
        """Counts a new connection.

        Raises:
            RequestError: there are too many, of this peer or of all; it is not counted.
        """
        most, most_per_peer = self._most()
        if self._open[peer] >= most_per_peer:
            taken = f"all {most_per_peer} connections that one address may have open (`npucompile serve --max-client-connections`)"
            raise RequestError(f"{peer} has {taken}; close one first", code="too_many_requests")
        if self.count >= most:
            taken = f"all {most} connections of this server are taken (`npucompile serve --max-connections`)"
            raise RequestError(f"{taken}; come back later", code="queue_full")
        self._open[peer] += 1

    def leave(self, peer: str) -> None:
        """Forgets a connection that was counted."""
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]
