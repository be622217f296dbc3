"""Decides when events that wait are delivered: each step's at once, or those of several short steps together."""

from __future__ import annotations

import math

EARLIEST = 0.75
"""Of the time between two steps, after which the next one may come and still wait."""


class Pace:
    """When what an engine sends is delivered; no clock, no threads. All times are seconds of one clock.

    Events wait for those of the next step if these are expected before the oldest of them has waited for the interval. What is expected is
    the time between the last two arrivals, so that steps longer than the interval never wait. Delivery is then the last thing of a step,
    while the next one needs no interpreter, and not when a timer happens to run out. A timer is there for a step that takes longer than
    was expected. It is set anew with each delivery, so that it seldom runs out, and nothing waits that it would be too late for.

    Args:
        interval_s: longest time that an event waits; 0 lets none wait.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s = -math.inf
        self._gap_s = math.inf
        self._oldest_s: float | None = None
        self._timer_s = math.inf

    def arrived(self, now_s: float, *, urgent: bool) -> bool:
        """Events have come; returns whether all that wait are to be delivered at once.

        Args:
            urgent: whether one of them cannot wait.
        """
        self._gap_s, self._last_s = now_s - self._last_s, now_s
        if self._oldest_s is None:
            self._oldest_s = now_s
        until_s = self._oldest_s + self._interval_s
        return urgent or self._timer_s > until_s or now_s + self._gap_s > until_s

    def taken(self, now_s: float) -> float | None:
        """All that waited has been taken; returns when `timer` is to be called, in place of any time before, if at all."""
        self._oldest_s = None
        # In time for events that come a little earlier than expected, and late enough to find none where the last is the one expected.
        expected_s = now_s + EARLIEST * self._gap_s
        self._timer_s = expected_s + self._interval_s if self._gap_s < self._interval_s else math.inf
        return None if self._timer_s == math.inf else self._timer_s

    def timer(self, now_s: float) -> tuple[bool, float | None]:
        """The timer has run out; returns whether what waits is to be delivered, and when the timer is to run out next, if ever."""
        if self._oldest_s is not None and now_s < self._oldest_s + self._interval_s:
            self._timer_s = self._oldest_s + self._interval_s
            return False, self._timer_s
        due, self._oldest_s, self._timer_s = self._oldest_s is not None, None, math.inf
        return due, None
