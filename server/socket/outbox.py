"""What waits to be sent on one socket: bounded in bytes, and in how far its reader is behind.

The engine never waits for a reader. One that keeps up may get any number of events at once; one that does not is given `slow_reader_s`
to come back, and memory in the meantime.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

BATCH_BYTES = 2**18
"""Most bytes of frames that are written at once, if there are several."""

RESUME_BYTES = 2**20
"""Above this no more frames are read of a client: what it sends may be answered with more than it reads."""


class Outbox:
    """Frames of one socket, in order; used on the event loop alone.

    Args:
        max_bytes: may wait.
        slow_reader_s: how old the oldest frame may get.
        clock: monotonic seconds.
    """

    def __init__(self, max_bytes: int, slow_reader_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes, self._slow_reader_s, self._clock = max_bytes, slow_reader_s, clock
        self._batches: deque[tuple[list[bytes], float]] = deque()
        self._room = 0
        self._filled = asyncio.Event()
        self._readable = asyncio.Event()
        self._readable.set()
        self._sending_since_s: float | None = None
        self.waiting_bytes = 0

    def put(self, frames: list[bytes]) -> bool:
        """Adds frames, whatever the bounds; false where `complaint` could say nothing of them."""
        for frame in frames:
            size = len(frame)
            if size > self._room or not self._batches:
                self._batches.append(([], self._clock()))
                self._room = BATCH_BYTES
                self._filled.set()
            self._batches[-1][0].append(frame)
            self._room -= size
            self.waiting_bytes += size
        if self.waiting_bytes > RESUME_BYTES:
            self._readable.clear()
        return self.waiting_bytes > self._max_bytes or self._sending_since_s is not None

    async def take(self) -> list[bytes]:
        """The next frames to send, as soon as there are any; what was taken before has been sent then."""
        self._sending_since_s = None
        await self._filled.wait()
        batch, self._sending_since_s = self._batches.popleft()
        self.waiting_bytes -= sum(map(len, batch))
        if not self._batches:
            self._filled.clear()
        if self.waiting_bytes <= RESUME_BYTES:
            self._readable.set()
        return batch

    async def readable(self) -> None:
        """Waits until so little is left to send that another frame of the client may be read."""
        await self._readable.wait()

    def complaint(self) -> str | None:
        """Why the reader is too slow; None while it is not."""
        if self.waiting_bytes > self._max_bytes:
            return f"{self.waiting_bytes} bytes wait to be read; the limit is {self._max_bytes}"
        oldest_s = self._sending_since_s
        if oldest_s is not None and self._clock() - oldest_s > self._slow_reader_s:
            return f"the client is {self._slow_reader_s:g} s behind"
        return None
