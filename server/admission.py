"""Admits requests: how many may wait and run, of each client and of all, and none while the server ends.

The engine's queue is in order of arrival. So that one client cannot fill it, a client has a share: as long as others have requests, it
may hold at most an equal part of the places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..graphs.errors import RequestError


class Admission:
    """Requests that wait or run; used on the event loop alone.

    Args:
        places: requests that may wait or run, all together.
        per_client: of one client.
    """

    def __init__(self, places: int, per_client: int) -> None:
        self._places, self._per_client = places, per_client
        self._held: Counter[str] = Counter()

    @property
    def live(self) -> int:
        """Requests admitted that have not ended."""
        return self._held.total()

    def enter(self, client: str, count: int = 1) -> Callable[[], None]:
        """Takes places for requests of one client, all or none.

        Returns:
            Gives back one of the places; to be called once for each request.

        Raises:
            RequestError: there are too few (codes too_many_requests, queue_full).
        """
        held = self._held[client]
        if held + count > self._per_client:
            raise RequestError(
                f"{count} requests more beside {held} that wait or run; one client may have {self._per_client}", code="too_many_requests"
            )
        clients = len(self._held.keys() | {client})
        share = self._places // clients
        if self.live + count > self._places:
            raise RequestError(f"{self.live} requests wait or run, and {self._places} may; come back later", code="queue_full")
        # The last half of the places is shared out, so that a client that comes second finds some.
        if held + count > share and self.live + count > self._places // 2 and clients > 1:
            raise RequestError(
                f"{held} requests of this client wait or run; its share among {clients} clients is {share} of {self._places}",
                code="too_many_requests",
            )
        self._held[client] += count
        return lambda: self._leave(client)

    def _leave(self, client: str) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
