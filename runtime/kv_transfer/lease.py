"""How long a prefill server may begin to write to a decode server: a time that the reader extends, and that a paused writer outlives not.

A writer asks with its own time, and what is granted counts from then on (`messages.Renew`). So no two clocks are compared, and an
answer that was read late, because the process stood still, grants nothing. What was begun goes on; `write_access` ends that.
"""

from __future__ import annotations

import time

LEASE_S, RENEW_S = 10.0, 1.0
"""How long a lease is, and how often it is renewed while rooms are open."""


def clock_s() -> float:
    """Seconds that go on while a process is stopped and while its machine sleeps; of all processes of a machine the same."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Lease:
    """One of a connection. Any thread may look at it; one extends it.

    Attributes:
        until_s: when it is over.
    """

    def __init__(self) -> None:
        self.until_s = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing may be begun."""
        return clock_s() >= self.until_s

    def extend(self, until_s: float) -> None:
        """The other server has answered a question of `LEASE_S` before."""
        self.until_s = max(self.until_s, until_s)
