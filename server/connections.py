"""Counts the connections of each peer and of all, from their first byte to their last."""

from __future__ import annotations

from collections import Counter

from ..graphs.errors import RequestError


class Connections:
    """Open connections; used on the event loop alone.

    Args:
        most: open at once.
        most_per_peer: of one address.
    """

    def __init__(self, most: int, most_per_peer: int) -> None:
        self._most, self._most_per_peer = most, most_per_peer
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
        if self._open[peer] >= self._most_per_peer:
            most = f"all {self._most_per_peer} connections that one address may have open"
            raise RequestError(f"{peer} has {most}; close one first", code="too_many_requests")
        if self.count >= self._most:
            raise RequestError(f"all {self._most} connections of this server are taken; come back later", code="queue_full")
        self._open[peer] += 1

    def leave(self, peer: str) -> None:
        """Forgets a connection that was counted."""
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]
