"""Memory of the state pools on this machine: reserved whole, resident from the first write, and given back when nothing is in it."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ..graphs.types import Leaf

ADVICE = "linux" if sys.platform.startswith("linux") else ""
"""Where an anonymous mapping takes advice that frees its pages at once; on other systems they stay resident once they were written."""


class PoolMemory:
    """State pools in anonymous memory of their own.

    The kernel gives a page of memory (4 KiB on most machines) when it is first written; reading one before that finds zeros and makes
    nothing resident. So a pool of any size takes what the slots and KV pages take that were ever written. Graphs see plain tensors.

    Huge pages are declined: on a machine that hands them out unasked a write of one slot would make 2 MiB resident, slots of others
    included.

    Attributes:
        tensors: one per leaf, in order; contiguous, zero until they are written.

    Args:
        leaves: pools of one rank; the first dimension counts KV pages, state slots or request slots, as its axis says.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._maps = [_reserve(math.prod(leaf.aval.shape) * leaf.aval.dtype.itemsize) for leaf in leaves]
        self._axes = [str(leaf.aval.axes[0]) for leaf in leaves]
        self._stride = [math.prod(leaf.aval.shape[1:]) * leaf.aval.dtype.itemsize for leaf in leaves]
        self.tensors = [_tensor(memory, leaf) for memory, leaf in zip(self._maps, leaves, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved."""
        return sum(map(len, self._maps))

    def give_back(self, numbers: Mapping[str, Iterable[int]]) -> int:
        """Returns memory of pages and slots to the system; they read as zeros until they are written again.

        Args:
            numbers: what nothing will read before it is written, by axis: "pages", "slots".

        Returns:
            Bytes given back, whether they were resident or not: whole pages of memory, so that neighbours in one keep theirs.
        """
        total = 0
        for memory, axis, stride in zip(self._maps, self._axes, self._stride, strict=True):
            for first, last in _runs(numbers.get(axis.removeprefix("first_"), ())):
                start, end = -(-first * stride // mmap.PAGESIZE) * mmap.PAGESIZE, last * stride // mmap.PAGESIZE * mmap.PAGESIZE
                if ADVICE and start < end:
                    memory.madvise(mmap.MADV_DONTNEED, start, end - start)
                    total += end - start
        return total


def _reserve(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if ADVICE:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _tensor(memory: mmap.mmap, leaf: Leaf) -> torch.Tensor:
    shape, dtype = leaf.aval.shape, leaf.aval.dtype
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First number of each run of consecutive ones, and the number after its last."""
    first = last = -1
    for number in sorted(numbers):
        if number != last:
            if last > first:
                yield first, last
            first = number
        last = number + 1
    if last > first:
        yield first, last
