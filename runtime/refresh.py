"""Loads the executables that a build finishes behind a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..graphs.errors import NpucompileError
from .executor import Executor, ExecutorError

log = logging.getLogger(__name__)


class Refresher:
    """Calls `executor.refresh` now and then; for the thread that steps.

    Args:
        every_s: shortest time between two calls; None never calls it.
        clock: monotonic seconds.
    """

    def __init__(self, executor: Executor, every_s: float | None, clock: Callable[[], float]) -> None:
        self.every_s = every_s
        self._executor, self._clock = executor, clock
        self._last_s = clock()
        self._complaint = ""

    def when_due(self) -> None:
        """Refreshes if it is time to. What fails leaves the executables as they are, and is logged once and not at every try.

        Raises:
            ExecutorError: a device or a rank is lost.
        """
        if self.every_s is None:
            return
        now_s = self._clock()
        if now_s - self._last_s < self.every_s:
            return
        self._last_s = now_s
        try:
            if self._executor.refresh():
                log.info("new executables were loaded")
            self._complaint = ""
        except ExecutorError:
            raise
        except Exception as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("refresh failed; the executables stay as they are: %s", error, exc_info=not isinstance(error, NpucompileError))
