"""Counts the connections of each peer and of all, from their first byte to their last."""

from __future__ import annotations

from collections.abc import Callable

from ..requests.error_objects import Refusal
from .tally import Tally


class Connections:
    """Open connections; used on the event loop alone.

    Args:
        most: how many may be open at once now, of all and of one address.
        trusts: whether an address is a proxy's, whose connections are those of many.
        tally: counts them.
    """

    def __init__(
        self, most: Callable[[], tuple[int, int]], trusts: Callable[[str], bool] = lambda _: False, tally: Tally | None = None
    ) -> None:
        self._most, self._trusts = most, trusts
        self._open = Tally() if tally is None else tally

    @property
    def count(self) -> int:
        """Connections open now."""
        return self._open.total

    def enter(self, peer: str) -> None:
        """Counts a new connection.

        Raises:
            RequestError: there are too many, of this peer or of all; it is not counted.
        """
        most, most_per_peer = self._most()
        if self._open[peer] >= most_per_peer and not self._trusts(peer):
            raise Refusal("too_many_requests.connections", peer=peer, most=most_per_peer)
        if self.count >= most:
            raise Refusal("queue_full.connections", most=most)
        self._open.add(peer, 1)

    def leave(self, peer: str) -> None:
        """Forgets a connection that was counted."""
        self._open.add(peer, -1)
