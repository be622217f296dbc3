"""How long refused input waits: a client that sends little else must not take the processor from the streams of others."""

from __future__ import annotations

from collections.abc import Callable

BURST_S = 0.25
"""What is refused at once takes this long at the rate; a whole second of it, with nothing held back, is a long pause for others."""

KEPT = 1024
"""Clients, above which those are forgotten whose refusals would not wait."""


class Refusals:
    """The pace at which each client is refused; used on the event loop alone.

    A client is refused `per_s` times a second, and after a while without any a quarter of that at once. What is beyond waits for its
    turn, one after the other: the answer over HTTP, and what follows on a websocket. Nothing else that the client has asked for waits.

    Args:
        per_s: refusals a second; None lets none wait.
        clock: monotonic seconds.
    """

    def __init__(self, per_s: float | None, clock: Callable[[], float]) -> None:
        self._gap_s = 0.0 if per_s is None else 1 / per_s
        self._burst_s = max(BURST_S, self._gap_s)
        self._clock = clock
        self._free_s: dict[str, float] = {}

    def wait_s(self, client: str) -> float:
        """Counts a refusal; returns for how many seconds it waits."""
        if not self._gap_s:
            return 0.0
        now_s = self._clock()
        if len(self._free_s) > KEPT:
            self._free_s = {name: free_s for name, free_s in self._free_s.items() if free_s > now_s}
        # The generic cell rate algorithm (ITU-T I.371): when all that was refused would be over, had each taken its part of a second.
        free_s = max(self._free_s.get(client, now_s), now_s) + self._gap_s
        self._free_s[client] = free_s
        return max(0.0, free_s - now_s - self._burst_s)
