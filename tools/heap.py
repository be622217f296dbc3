"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes


def give_back_heap() -> None:
    """Returns what is free to the system, where the C library can (glibc): holes between what is in use grow by gigabytes of tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
