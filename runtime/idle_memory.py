"""Gives back the memory of pages and state slots that were free for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .executor import Executor
from .scheduler.kv_cache_manager import KVCacheManager

UNUSED_S = 300.0
"""How long a page or slot is free, at least, before its memory is given back; at most twice as long. Writing it again costs the page faults
of a first write: about 5 us for 4 KiB in a virtual machine, above a second where sixteen requests begin at once (docs/lab/cpu.md)."""


class IdleMemory:
    """Calls `executor.give_back` now and then; for the thread that steps.

    Args:
        managers: of every dp group.
        clock: monotonic seconds.
        never: gives nothing back, for engines that nothing wakes while they are idle.
    """

    def __init__(self, executor: Executor, managers: Sequence[KVCacheManager], clock: Callable[[], float], *, never: bool = False) -> None:
        self._executor, self._managers, self._clock, self._never = executor, managers, clock, never
        self._last_s = 0.0 if never else clock()

    def when_due(self, *, busy: bool) -> None:
        """Gives back what was free since the last time, if it is time to and no step is in flight (`busy`)."""
        if busy or self._never:
            return
        now_s = self._clock()
        if now_s - self._last_s < UNUSED_S:
            return
        self._last_s = now_s
        unused = [manager.take_unused() for manager in self._managers]
        if any(numbers for own in unused for numbers in own.values()):
            self._executor.give_back(unused)
