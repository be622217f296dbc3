"""Describes this machine, and measures how fast it reads memory."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from ... import __version__
from ...lowering import isa
from .stats import Clock, seconds_per_call

MEMORY_BUFFER_BYTES = 512 * 2**20
"""Far larger than any last-level cache, so that reading it reads memory."""

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class MeasuredMachine:
    """Where and when figures were measured.

    Attributes:
        cores: available to this process.
        isa: the instruction sets that are used, by the level of lowering/isa.py.
        threads: of torch's operators.
        cache_bytes: size of the last-level cache; 0 if unknown.
        load: load average over the last minute, this benchmark included.
    """

    cpu: str
    cores: int
    isa: str
    threads: int
    cache_bytes: int
    torch: str
    npucompile: str
    python: str
    date: str
    load: float


def describe(cpuinfo: Path = CPUINFO, caches: Path = CACHES) -> MeasuredMachine:
    """This machine, now."""
    return MeasuredMachine(
        cpu=cpu_model(cpuinfo.read_text(encoding="utf-8")) if cpuinfo.is_file() else platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        isa=isa.described(),
        threads=torch.get_num_threads(),
        cache_bytes=cache_bytes(caches),
        torch=str(torch.__version__),
        npucompile=__version__,
        python=platform.python_version(),
        date=datetime.now(UTC).date().isoformat(),
        load=os.getloadavg()[0],
    )


def lines(machine: MeasuredMachine) -> list[str]:
    """The description as lines of text."""
    cache = f"{machine.cache_bytes / 2**20:.0f} MiB last-level cache" if machine.cache_bytes else "unknown cache"
    return [
        f"{machine.cpu}, {machine.cores} cores, {machine.isa}, {cache}; {machine.threads} threads",
        f"npucompile {machine.npucompile}, torch {machine.torch}, Python {machine.python}",
        f"{machine.date}, load average {machine.load:.1f} at the start",
    ]


def cpu_model(cpuinfo: str) -> str:
    """The name in /proc/cpuinfo, or the architecture if it has none."""
    match = re.search(r"^model name\s*:\s*(.+?)\s*$", cpuinfo, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def cache_bytes(caches: Path = CACHES) -> int:
    """Size of the largest cache that sysfs lists (files such as `index3/size` with `33792K`); 0 if there is none."""
    sizes = [0]
    for file in caches.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", file.read_text(encoding="utf-8").strip())
        if match:
            sizes.append(int(match.group(1)) * _UNITS[match.group(2)])
    return max(sizes)


@dataclass(frozen=True)
class ReadLoop:
    """A loop over a buffer.

    Attributes:
        read: reads the whole buffer, with all threads.
        nbytes: size of the buffer.
        place: "cache" when it fits the last-level cache, else "memory".
    """

    read: Callable[[], object]
    nbytes: int
    place: str


def reader(working_set_bytes: int, cache: int, clock: Clock, *, memory_buffer_bytes: int = MEMORY_BUFFER_BYTES) -> ReadLoop:
    """A loop that reads as fast as a step with a working set of that size could.

    A working set that fits the last-level cache is read from there and may beat memory, so its buffer has the same size. All others get
    a buffer larger than the cache. The fastest of several read operators is used.

    Args:
        cache: bytes of the last-level cache; 0 if unknown, which counts every working set as larger.
    """
    cached = working_set_bytes <= cache
    nbytes = max(working_set_bytes if cached else memory_buffer_bytes, 2**16) // 2**14 * 2**14
    # Filled, because untouched pages all map to one page of zeros.
    flat = torch.ones(nbytes // 4)
    rows, vector = flat.view(-1, 2**12), torch.ones(2**12)
    reads: list[Callable[[], object]] = [flat.sum, lambda: torch.dot(flat, flat), lambda: rows @ vector]
    best = min(reads, key=lambda read: seconds_per_call(read, clock, calls=3))
    return ReadLoop(best, nbytes, "cache" if cached else "memory")
