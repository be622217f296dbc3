"""lowering/backends/inductor/huge_pages.py: what it says of memory is what the system says of it."""

from __future__ import annotations

import gc
import re
import time
import weakref
from pathlib import Path

import pytest
import torch

from npucompile.lowering.backends.inductor import huge_pages

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(not SMAPS.is_file(), reason="only Linux tells what a mapping is")


def mapping(memory: torch.Tensor) -> list[str]:
    """The lines of smaps about the mapping that memory lies in."""
    for text in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        first, last = (int(part, 16) for part in text.split()[0].split("-"))
        if first <= memory.data_ptr() < last:
            return text.splitlines()
    raise AssertionError("the memory is not mapped")


def number(lines: list[str], name: str) -> int:
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def test_memory_may_have_huge_pages() -> None:
    """Private, without a name, and advised so ("hg"): shared memory, which mmap gives by default, has none of them by default."""
    for size in (100, 5 * 2**20):
        memory = huge_pages.huge(size).fill_(1)
        assert (memory.numel(), memory.data_ptr() % huge_pages.HUGE_BYTES) == (size, 0)
        lines = mapping(memory)
        assert len(lines[0].split()) == 5
        assert lines[0].split()[1] == "rw-p"
        assert "hg" in next(line for line in lines if line.startswith("VmFlags")).split()


@pytest.mark.skipif(not huge_pages.can_join(), reason="this system joins no pages: Linux before 6.1, or one that has no huge pages")
def test_small_pages_are_joined_later_and_keep_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, function: object, arguments: tuple[torch.Tensor]) -> None:
            assert (seconds, function) == (huge_pages.DELAY_S, huge_pages.join)
            timers.append((self, arguments))

        def start(self) -> None:
            assert self.daemon

    monkeypatch.setattr(huge_pages.threading, "Timer", Timer)
    monkeypatch.setattr(huge_pages, "_pending", set())
    monkeypatch.setattr(huge_pages, "LARGE_BYTES", 20 * 2**20)
    size = 21 * 2**20 + 5
    memory = huge_pages.joined_later(size)
    memory.copy_(torch.arange(size, dtype=torch.int64) % 251)
    # Mappings of one kind that touch are one to the system, so that others' pages may be in it.
    before = number(mapping(memory), "AnonHugePages")
    [(_, arguments)] = timers
    # A piece whose pages the system has none for is left out, but may be joined in part.
    rests: list[float] = []
    monkeypatch.setattr(huge_pages.time, "sleep", rests.append)
    began = time.perf_counter()
    joined = huge_pages.join(*arguments)
    # 16 MiB and what is left, each with a rest that it pays for.
    assert len(rests) == 2
    assert 0 < sum(rests) < 3 * (time.perf_counter() - began)
    assert 0 < joined <= number(mapping(memory), "AnonHugePages") - before <= 22 * 2**20
    assert torch.equal(memory.long(), torch.arange(size) % 251)


@pytest.mark.skipif(not huge_pages.can_join(), reason="this system joins no pages: Linux before 6.1, or one that has no huge pages")
def test_settled_memory_is_joined_and_nothing_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "LARGE_BYTES", 2 * 2**20)
    monkeypatch.setattr(huge_pages, "DELAY_S", 0.1)
    memory = huge_pages.joined_later(4 * 2**20).fill_(1)
    before = number(mapping(memory), "AnonHugePages")
    huge_pages.settle()
    assert number(mapping(memory), "AnonHugePages") > before
    kept = weakref.ref(memory.untyped_storage())
    del memory
    gc.collect()
    assert kept() is None
    huge_pages.settle()


def test_what_is_small_or_cannot_be_joined_is_huge_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.threading, "Timer", None)
    assert "hg" in mapping(huge_pages.joined_later(2**20).fill_(1))[-1].split()
    monkeypatch.setattr(huge_pages, "can_join", lambda: False)
    assert "hg" in mapping(huge_pages.joined_later(huge_pages.LARGE_BYTES))[-1].split()
