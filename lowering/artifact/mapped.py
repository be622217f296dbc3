"""Gives back the memory of mapped files whose contents are not needed for now."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")

_DONT_NEED = 4
"""MADV_DONTNEED: a private mapping of a file is read from the file again, so nothing that was written into it may be wanted."""


def release(tensors: Iterable[torch.Tensor], maps: Path = MAPS) -> int:
    """Takes the pages of tensors that lie in a mapped file out of this process; a later read finds the file's contents again.

    Tensors in other memory are left alone, and all where the system does not say what is mapped.

    Args:
        tensors: never written since they were mapped.

    Returns:
        Bytes given back.
    """
    if not maps.is_file():
        return 0
    mapped, libc, total = _of_files(maps), ctypes.CDLL(None), 0
    for tensor in tensors:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(start <= begin and end <= stop for start, stop in mapped):
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)
            total += last - first
    return total


def _of_files(maps: Path) -> list[tuple[int, int]]:
    """The address ranges that are private mappings of files on disks (proc(5))."""
    found = []
    for line in maps.read_text(encoding="utf-8").splitlines():
        addresses, rights, _, device, inode, *path = line.split(maxsplit=5)
        if rights.endswith("p") and inode != "0" and device != "00:00" and path:
            start, stop = (int(address, 16) for address in addresses.split("-"))
            found.append((start, stop))
    return found
