"""The event of a device that torch has events for: waiting with a limit, which torch's own cannot."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..graphs.errors import LoweringError
from .device_error import DeviceError

POLL_S = 50e-6
"""How often an event is asked for while somebody waits with a limit: a fraction of the shortest steps."""


class RecordedEvent(Protocol):
    """A recorded event of a stream, such as `torch.npu.Event`."""

    def query(self) -> bool:
        """Whether the stream has passed it; raises RuntimeError where something before it failed."""
        ...

    def synchronize(self) -> None:
        """Waits until it has; raises RuntimeError where something before it failed."""
        ...


class StreamEvent:
    """A place in the current stream of a device (`device.Event`); any thread may wait for it.

    Args:
        recorded: the event.
        name: of the device, for errors.
        enter: makes the device the current one of the calling thread.
        when_late: where to look if it does not come in time, for errors.
    """

    def __init__(self, recorded: RecordedEvent, name: str, enter: Callable[[], None], when_late: str) -> None:
        self._recorded, self._name, self._enter, self._when_late = recorded, name, enter, when_late

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the stream has passed it.

        Raises:
            LoweringError: something queued before it failed, or the time is over.
        """
        try:
            self._enter()
            if timeout_s is None:
                self._recorded.synchronize()
                return
            deadline = time.monotonic() + timeout_s
            while not self._recorded.query():
                if time.monotonic() > deadline:
                    raise LoweringError(f"{self._name} has not finished within {timeout_s:g} s; {self._when_late}")
                time.sleep(POLL_S)
        except RuntimeError as error:
            raise DeviceError(f"a step on {self._name}", str(error)) from error
