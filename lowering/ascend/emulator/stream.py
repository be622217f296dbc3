"""The stream of an emulated device: one thread that runs what was queued, in order, until something fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from ....graphs.errors import LoweringError

Job = Callable[[], None]
CLOSE_S = 5.0


class EmulatedEvent:
    """A place in a stream, see `lowering.device.Event`."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._passed = stream, threading.Event()
        self._failure: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the stream has passed it.

        Raises:
            LoweringError: something queued before it failed, or the time is over, saying what the stream runs.
        """
        if not self._passed.wait(timeout_s):
            raise LoweringError(f"{self._stream.name} has not come to this event in {timeout_s:g} s: {self._stream.doing()}")
        if self._failure is not None:
            raise LoweringError(str(self._failure)) from self._failure

    def passed(self) -> bool:
        """Whether the stream has passed it; the events of a failed stream are passed too."""
        return self._passed.is_set()

    def set(self, failure: BaseException | None) -> None:
        """The stream has come here, after this failure."""
        self._failure = failure
        self._passed.set()


class Stream:
    """Runs jobs in order on a thread of its own. The first failure is final: what is queued behind it is not run.

    Args:
        name: of the device, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[tuple[str, Job] | EmulatedEvent | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._current: str | None = None
        self._details: Callable[[], str] | None = None
        # OpenMP counts threads for each thread that starts loops.
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._last = self.record()

    def launch(self, what: str, job: Job) -> None:
        """Queues a job.

        Args:
            what: says in messages what it does, e.g. "step npucompile_0".

        Raises:
            LoweringError: an earlier job failed, or the stream is closed.
        """
        self.check()
        self._jobs.put((what, job))
        self._last = self.record()

    def run(self, what: str, job: Job) -> None:
        """Queues a job and waits for it.

        Raises:
            LoweringError: it, or an earlier one, failed.
        """
        self.launch(what, job)
        self._last.wait()

    def record(self) -> EmulatedEvent:
        """An event behind everything queued so far."""
        event = EmulatedEvent(self)
        if self._thread.is_alive():
            self._jobs.put(event)
        else:
            event.set(self._failure)
        return event

    def idle(self) -> bool:
        """Whether everything queued has run."""
        return self._last.passed()

    def check(self) -> None:
        """Raises:
        LoweringError: a job failed, or the stream is closed.
        """
        if self._failure is not None:
            raise LoweringError(f"{self.name} has failed before: {self._failure}") from self._failure
        if not self._thread.is_alive():
            raise LoweringError(f"{self.name} is closed")

    def describe(self, details: Callable[[], str]) -> None:
        """Says how the current job, which calls this, tells how far it is."""
        self._details = details

    def doing(self) -> str:
        """What the stream runs now."""
        current, details = self._current, self._details
        if current is None:
            return "it runs nothing"
        return f"it runs {current}" + (f", {details()}" if details is not None else "")

    def close(self) -> None:
        """Waits for what is queued and ends the thread; a job that takes longer than CLOSE_S is left to the end of the process."""
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (item := self._jobs.get()) is not None:
            if isinstance(item, EmulatedEvent):
                item.set(self._failure)
            elif self._failure is None:
                self._current, self._details = item[0], None
                self._failure = _failure(*item)
                self._current = None


def _failure(what: str, job: Job) -> BaseException | None:
    try:
        job()
    except LoweringError as error:
        return LoweringError(f"{what}: {error}")
    # The device answers whatever a job raises, as it answers an illegal access: with an error to all that comes after.
    except Exception as error:
        return LoweringError(f"{what}: {type(error).__name__}: {error}")
    return None
