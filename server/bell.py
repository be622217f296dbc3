"""Wakes an event loop from another thread, which keeps the interpreter's lock while it does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable

_write = ctypes.PyDLL(None).write
"""write(2). Unlike `os.write` it does not give up the interpreter's lock."""
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Bell:
    """Has a function called on a loop.

    `call_soon_threadsafe` gives up the lock while it writes to the loop; the loop wakes up, takes it, and the thread waits for it until the
    loop has nothing left to do: 0.4 ms of a step of 16 streams. After `ring` the loop waits, until the thread gives the lock up by itself.

    Args:
        loop: one that is not closed; this is called on its thread, or before it runs.
        answer: called once or more after each ring.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Callable[[], None]) -> None:
        self._answer = answer
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)
        loop.add_reader(self._reader, self._hear)

    def ring(self) -> None:
        """On any thread; after the loop has closed it does nothing."""
        # A pipe that is full has been rung.
        _write(self._writer, b"\0", 1)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        self._answer()
