"""The thread that reads lengths back and updates captured graphs with them, so that who launches steps does not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ....graphs.errors import LoweringError

Job = Callable[[], None]
CLOSE_S = 5.0


class Updates:
    """Runs jobs in order on a thread of its own. The first failure is final: nothing runs behind it, and the next `put` raises it.

    Args:
        name: of the device, for messages.
        enter: makes the device the thread's own.
    """

    def __init__(self, name: str, enter: Job = lambda: None) -> None:
        self._name, self._enter = name, enter
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def failure(self) -> Exception | None:
        """What ended it."""
        return self._failure

    def put(self, job: Job) -> None:
        """Queues a job.

        Raises:
            LoweringError: an earlier one failed.
        """
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"lengths of {self._name}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def check(self) -> None:
        """Raises:
        LoweringError: a job failed.
        """
        if self._failure is not None:
            raise LoweringError(f"the lengths of a step on {self._name} could not be updated: {self._failure}") from self._failure

    def close(self) -> None:
        """Ends the thread behind what is queued; one that takes longer than CLOSE_S is left to the end of the process."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._enter()
        while (job := self._jobs.get()) is not None:
            if self._failure is None:
                try:
                    job()
                # Kept for who launches next: nobody joins this thread.
                except Exception as error:
                    self._failure = error
