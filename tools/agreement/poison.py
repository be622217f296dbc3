"""Tensors of one value that take memory only where something was written."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Sequence

import torch

CHUNK_BYTES = 4 * 2**20
"""Bytes that all of such a tensor shares, a multiple of every page and element. A process may have 65,530 mappings: 256 GiB of them."""

_PRIVATE, _FIXED = 0x02, 0x10
"""Flags of Linux's mmap, of which Python's own knows no address."""


def filled(shape: Sequence[int], value: float, dtype: torch.dtype) -> torch.Tensor:
    """As `torch.full`. A large one is one chunk of a file in memory, mapped privately again and again: a write copies a page.

    Pools of a step have places for all requests that are served at once, and a test case touches those of a few.
    """
    empty = torch.empty(0, dtype=dtype)
    size = torch.Size(shape).numel() * empty.element_size()
    if size < 2 * CHUNK_BYTES or not hasattr(os, "memfd_create"):
        return torch.full(tuple(shape), value, dtype=dtype)
    chunks = -(-size // CHUNK_BYTES)
    memory = mmap.mmap(-1, chunks * CHUNK_BYTES)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for chunk in range(chunks):
        _map(whole.data_ptr() + chunk * CHUNK_BYTES, _chunk(value, dtype))
    return whole[:size].view(dtype).view(tuple(shape))


def _map(address: int, file: int) -> None:
    """Maps the chunk over memory that is ours; it goes when that is unmapped."""
    if _mmap()(address, CHUNK_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE | _FIXED, file, 0) != address:
        raise OSError(ctypes.get_errno(), f"cannot map {CHUNK_BYTES} bytes: {os.strerror(ctypes.get_errno())}")


@functools.cache
def _mmap() -> Callable[..., int]:
    """The C library's function; to look it up takes 30 times as long as to call it."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    function.restype = ctypes.c_void_p
    return function


@functools.cache
def _chunk(value: float, dtype: torch.dtype) -> int:
    """The file of a value, open as long as the process."""
    file = os.memfd_create("filled")
    os.ftruncate(file, CHUNK_BYTES)
    with mmap.mmap(file, CHUNK_BYTES) as memory:
        elements = torch.full((CHUNK_BYTES // torch.empty(0, dtype=dtype).element_size(),), value, dtype=dtype)
        memory[:] = elements.view(torch.uint8).numpy().tobytes()
    return file
