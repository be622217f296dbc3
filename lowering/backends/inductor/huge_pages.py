"""Memory in huge pages, from which weights are read faster: fewer addresses are looked up, and a stream is not cut every 4 KiB."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import time
from weakref import WeakSet

import torch

HUGE_BYTES = 2 * 2**20
"""Of a huge page; `huge` and `joined_later` start at one."""

LARGE_BYTES = 64 * 2**20
"""From here on it matters when huge pages are made."""

DELAY_S = 2.0
"""Until small pages are joined: a load and a first token are over, which would wait for it."""

_PIECE_BYTES = 8 * HUGE_BYTES
"""Joined by one call, which Python's lock is given away for."""

_REST = 3.0
"""Times as long as a piece took, nothing is joined after it: who needs one of its pages waits, as do the threads that wait for them."""

_pending: WeakSet[threading.Timer] = WeakSet()

_COLLAPSE = 25
"""MADV_COLLAPSE, which Linux has since 6.1: joins small pages to huge ones at once, whatever they hold (madvise(2))."""


def huge(size: int) -> torch.Tensor:
    """Bytes in huge pages, where the system has them."""
    return _mapped(size, advised=True)


def joined_later(size: int) -> torch.Tensor:
    """Bytes in small pages, which a thread joins to huge ones a little later; in huge ones at once where they are few or cannot be joined.

    The first use of a free huge page may be slow: 1.5 GB took 2.1 s on a virtual machine whose host takes free memory back, and 0.3 s in
    small pages, which are found among those used just before. While they are joined, 8 to 16 s for as much, a step that reads them takes
    a third longer; joined without rests, two steps stood still for 1.2 to 1.9 s each.
    """
    if size < LARGE_BYTES or not can_join():
        return huge(size)
    memory = _mapped(size, advised=False)
    timer = threading.Timer(DELAY_S, join, (memory,))
    timer.daemon = True
    timer.start()
    _pending.add(timer)
    return memory


def settle() -> None:
    """Waits until what `joined_later` gave is joined, as a benchmark of what comes after that should."""
    for timer in list(_pending):
        timer.join()


def join(memory: torch.Tensor) -> int:
    """Joins the small pages of memory that `_mapped` gave to huge ones; contents stay, and others may read and write them meanwhile.

    Returns:
        Bytes of pieces that are in huge pages now.
    """
    joined = 0
    for at in range(0, memory.numel(), _PIECE_BYTES):
        size, began = min(_PIECE_BYTES, -(-(memory.numel() - at) // HUGE_BYTES) * HUGE_BYTES), time.perf_counter()
        joined += size if _collapse(memory.data_ptr() + at, size) else 0
        time.sleep(_REST * (time.perf_counter() - began))
    return joined


@functools.cache
def can_join() -> bool:
    """Whether the system joins small pages when it is asked to."""
    probe = _mapped(HUGE_BYTES, advised=False)
    probe.fill_(0)
    return _collapse(probe.data_ptr(), HUGE_BYTES)


def _collapse(address: int, size: int) -> bool:
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _COLLAPSE) == 0)


def _mapped(size: int, *, advised: bool) -> torch.Tensor:
    # Whole pages behind a start that is a multiple of them. Private: memory that processes may share, mmap's default, has huge pages only
    # where a setting of its own allows them.
    room = -(-size // HUGE_BYTES) * HUGE_BYTES + HUGE_BYTES
    memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advised and hasattr(mmap, "MADV_HUGEPAGE"):
        # Refused by a system that was built without huge pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_BYTES
    return whole[start : start + size]
