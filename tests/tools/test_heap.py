"""tools/heap.py: freed memory goes back to the system, and what is available is read from it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from npucompile.tools.heap import available_bytes, give_back_heap


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
def test_holes_are_given_back() -> None:
    # Small enough for the heap, with something in use behind each.
    holes = [(torch.ones(4096), torch.ones(16)) for _ in range(4096)]
    kept = [small for _, small in holes]
    full = resident_bytes()
    del holes
    give_back_heap()
    assert resident_bytes() < full - 40 * 2**20
    assert len(kept) == 4096


def test_available_memory_is_read_from_the_system() -> None:
    assert available_bytes("MemTotal:       32000000 kB\nMemFree: 1 kB\nMemAvailable:    2048 kB\n") == 2 * 2**20
    assert available_bytes("") == 0
