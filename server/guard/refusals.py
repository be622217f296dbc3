"""The rate limit of refusals: a client that sends little but illegal input must not take the processor from the streams of others."""

from __future__ import annotations

from collections.abc import Callable

BURST_S = 0.25
"""Burst of the rate limit, in seconds of refusals: at 200/s, 50 are answered at once. A burst of a full second paused other streams."""

WORK_SHARE = 0.1
"""Of a processor that requests of one client may take which are refused in the end."""

MOST_OWED_S = 15.0
"""However much work was refused, the client's next request has its turn by then: behind one address there may be many."""

LITTLE_S = 0.005
"""Work of a refusal that is only counted as one."""

MAX_CLIENTS = 1024
"""Number of clients above which those whose next refusal would not wait are forgotten."""


class Refusals:
    """Delays refusals to `per_s` a second for each client, with a burst of BURST_S, and to WORK_SHARE of a processor; used on the event
    loop alone.

    Over HTTP the refusal itself is delayed, on a websocket the next frame is read later. What takes long to prepare (`work.Work`) waits
    until the work of the client's earlier refusals is paid off. Nothing else of the client is delayed.

    Args:
        per_s: refusals a second; None delays none.
        clock: monotonic seconds.
    """

    def __init__(self, per_s: float | None, clock: Callable[[], float]) -> None:
        self._gap_s = 0.0 if per_s is None else 1 / per_s
        self._burst_s = max(BURST_S, self._gap_s)
        self._clock = clock
        self._due_s: dict[str, float] = {}
        self._paid_s: dict[str, float] = {}

    def charge(self, client: str, work_s: float) -> None:
        """Counts work for a request that may be refused; once it is admitted, it is given back as negative work."""
        if self._gap_s:
            now_s = self._clock()
            if len(self._paid_s) > MAX_CLIENTS:
                self._paid_s = {name: paid_s for name, paid_s in self._paid_s.items() if paid_s > now_s}
            self._paid_s[client] = min(max(self._paid_s.get(client, now_s), now_s) + work_s / WORK_SHARE, now_s + MOST_OWED_S)

    def owed_s(self, client: str, work_s: float = 0.0) -> float:
        """For how many seconds a client's request is delayed that takes work, of which `work_s` was counted."""
        return max(0.0, self._paid_s.get(client, 0.0) - work_s / WORK_SHARE - self._clock() - BURST_S)

    def wait_s(self, client: str, work_s: float = 0.0) -> float:
        """Counts a refusal, whose own work was `work_s`; returns for how many seconds it is delayed."""
        if not self._gap_s:
            return 0.0
        now_s = self._clock()
        if len(self._due_s) > MAX_CLIENTS:
            self._due_s = {name: due_s for name, due_s in self._due_s.items() if due_s > now_s}
        # The generic cell rate algorithm (ITU-T I.371): the time at which the refusals so far would have been due at the rate.
        due_s = max(self._due_s.get(client, now_s), now_s) + self._gap_s
        self._due_s[client] = due_s
        waits_s = max(0.0, due_s - now_s - self._burst_s)
        return waits_s if work_s <= LITTLE_S else max(waits_s, self.owed_s(client, work_s))
