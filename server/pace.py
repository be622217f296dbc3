"""Decides when events that wait are delivered: each step's at once, or those of several short steps together."""

from __future__ import annotations

import math


class Pace:
    """When what an engine sends is delivered; no clock, no threads. All times are seconds of one clock.

    Events wait for those of the next step if these are expected before the oldest of them has waited for the interval. What is expected is
    the time between the last two arrivals, so that steps longer than the interval never wait. Delivery is then the last thing of a step,
    while the next one needs no interpreter, and not when a timer happens to run out. A timer is there for a step that takes longer than
    was expected; nothing waits before it has been set.

    Args:
        interval_s: longest time that an event waits; 0 lets none wait.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s = -math.inf
        self._gap_s = math.inf
        self._oldest_s: float | None = None
        self._timed = False

    def arrived(self, now_s: float, *, urgent: bool) -> bool:
        """Events have come; returns whether all that wait are to be delivered at once.

        Args:
            urgent: whether one of them cannot wait.
        """
        self._gap_s, self._last_s = now_s - self._last_s, now_s
        if self._oldest_s is None:
            self._oldest_s = now_s
        return urgent or not self._timed or now_s + self._gap_s > self._oldest_s + self._interval_s

    def taken(self, now_s: float) -> float | None:
        """All that waited has been taken; returns when `timer` is to be called, if that is not known yet."""
        self._oldest_s = None
        if self._timed or self._gap_s >= self._interval_s:
            return None
        self._timed = True
        return now_s + self._interval_s

    def timer(self, now_s: float) -> tuple[bool, float | None]:
        """The timer has run out; returns whether what waits is to be delivered, and when it is to run out next, if ever."""
        if self._oldest_s is not None and now_s < self._oldest_s + self._interval_s:
            return False, self._oldest_s + self._interval_s
        due, self._oldest_s = self._oldest_s is not None, None
        # A short while after the last step: the next one may be on its way.
        self._timed = now_s - self._last_s < self._interval_s or due
        return due, now_s + self._interval_s if self._timed else None
