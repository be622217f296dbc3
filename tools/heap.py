"""Memory of this machine: what is available, and what the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
import re

from ..graphs import control_group


def give_back_heap() -> None:
    """Returns what is free to the system, where the C library can (glibc): holes between what is in use grow by gigabytes of tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes(meminfo: str) -> int:
    """Available memory, from the text of /proc/meminfo, of which a control group may leave less; 0 where it is not there."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    available, free = int(match.group(1)) * 1024 if match else 0, control_group.free_memory()
    return available if free is None else min(available, free)
