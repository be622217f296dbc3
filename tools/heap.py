"""Memory of this machine: what is available, and what the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
import re


def give_back_heap() -> None:
    """Returns what is free to the system, where the C library can (glibc): holes between what is in use grow by gigabytes of tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes(meminfo: str) -> int:
    """Available memory, from the text of /proc/meminfo; 0 where it is not there."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0
