"""lowering/ascend/emulator/memory.py: the host can copy to and from it, in the order of the stream, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.memory import (
    NZ,
    DeviceTensor,
    PinnedMemory,
    WrittenBytes,
    allocate,
    check_arrived,
    forget,
    to_nz,
)
from npucompile.lowering.ascend.emulator.stream import Stream
from npucompile.lowering.device import MemoryPart


class Memory:
    """A stream and what lies behind it."""

    def __init__(self) -> None:
        self.stream, self.pinned = Stream("emulated:0"), PinnedMemory()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> DeviceTensor:
        return allocate(self.stream, self.pinned, shape, dtype)

    def staged(self, *shape: int) -> torch.Tensor:
        return self.pinned.allocate(4 * torch.Size(shape).numel()).view(torch.float32).view(shape)


@pytest.fixture
def memory():
    memory = Memory()
    yield memory
    memory.stream.close()


NUMBERS = torch.arange(32.0).view(4, 8)


def test_what_is_copied_there_comes_back_whole_and_in_parts(memory: Memory) -> None:
    there = memory.empty(4, 8).copy_(NUMBERS)
    assert torch.equal(there.cpu(), NUMBERS)
    for part in (
        lambda x: x[1:3],
        lambda x: x.narrow(1, 2, 3),
        lambda x: x.view(2, 16)[1],
        lambda x: x.reshape(32).view(torch.int32),
        lambda x: x.as_strided((2, 2), (8, 3), 5),
        lambda x: x[2].unsqueeze(0).detach(),
    ):
        view = part(there)
        assert torch.equal(view.cpu(), part(NUMBERS))
        assert (view.shape, view.stride(), view.is_contiguous()) == (*(lambda x: (x.shape, x.stride(), x.is_contiguous()))(part(NUMBERS)),)
        assert view.data_ptr() - there.data_ptr() == part(NUMBERS).data_ptr() - NUMBERS.data_ptr()
    other = memory.empty(4, 8).copy_(there)
    there[1].zero_()
    there[2, :4].fill_(7)
    memory.stream.record().wait(30)
    assert torch.equal(other.cpu(), NUMBERS)
    assert there[1:3, :5].cpu().tolist() == [[0] * 5, [7, 7, 7, 7, 20]]


def test_a_queued_copy_reads_and_writes_host_memory_when_the_stream_comes_to_it(memory: Memory) -> None:
    there, sent, back = memory.empty(4, 8), memory.staged(4, 8), memory.staged(4, 8)
    gate = threading.Event()
    memory.stream.launch("hold", lambda: gate.wait(30))
    sent.copy_(NUMBERS)
    there.copy_(sent, non_blocking=True)
    back.copy_(there, non_blocking=True)
    assert not back.any()
    # Too early: the device has not read it yet.
    sent.zero_()
    sent[0] = 5
    gate.set()
    memory.stream.record().wait(30)
    assert back.tolist() == [[5.0] * 8, *[[0.0] * 8] * 3]


READS: dict[str, Callable[[DeviceTensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: x.__array__(),
    "bool": lambda x: bool(x[0, 0]),
    "int": lambda x: int(x[0, 0]),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("how", READS)
def test_a_host_read_is_refused(memory: Memory, how: str) -> None:
    there = memory.empty(4, 8).copy_(NUMBERS)
    with pytest.raises(LoweringError, match="a host read inside a step; legal is copy_ into pinned memory"):
        READS[how](there)


def test_a_copy_that_waits_is_a_host_read_while_work_is_queued(memory: Memory) -> None:
    there, gate = memory.empty(4, 8).copy_(NUMBERS), threading.Event()
    memory.stream.launch("hold", lambda: gate.wait(30))
    for read in (there.cpu, lambda: torch.zeros(4, 8).copy_(there)):
        with pytest.raises(LoweringError, match="a host read inside a step"):
            read()
    gate.set()
    memory.stream.record().wait(30)
    assert torch.equal(there.cpu(), NUMBERS)


def test_its_values_are_not_shown(memory: Memory) -> None:
    there = memory.empty(4, 8).copy_(NUMBERS)
    assert repr(there).startswith("DeviceTensor((4, 8), torch.float32, ND, emulated:0 at 0x")
    assert str(there) == repr(there) == f"{there}"


REFUSED: dict[str, tuple[Callable[[Memory, DeviceTensor], object], str]] = {
    "operator": (lambda m, x: x + 1, "aten.add.Tensor on a tensor of emulated:0: operators run in graphs alone"),
    "list": (lambda m, x: torch.cat([x, x]), "aten.cat.default on a tensor of the emulated device"),
    "clone": (lambda m, x: x.clone(), "aten.clone"),
    "reshape with a copy": (lambda m, x: x[:, :2].reshape(8), "operators run in graphs alone"),
    "in place": (lambda m, x: x.add_(1), "aten.add_"),
    "dtype": (lambda m, x: x.copy_(torch.zeros(4, 8, dtype=torch.int32)), r"of \(4, 8\) torch.int32 into \(4, 8\) torch.float32"),
    "cast": (lambda m, x: x.half(), "as torch.float16 to None"),
    "shape": (lambda m, x: x.copy_(torch.zeros(8)), r"a copy of \(8,\) torch.float32 into \(4, 8\)"),
    "unpinned": (lambda m, x: x.copy_(torch.zeros(4, 8), non_blocking=True), "the host's memory is not pinned"),
    "unpinned back": (lambda m, x: torch.zeros(4, 8).copy_(x, non_blocking=True), "the host's memory is not pinned"),
    "strided": (lambda m, x: x[:, :2].copy_(m.staged(4, 2), non_blocking=True), "not contiguous"),
    "two devices": (lambda m, x: x.copy_(allocate(m.other, m.pinned, (4, 8), torch.float32)), "legal is one device"),
    "tiles": (lambda m, x: to_nz(x), r"\(4, 8\) torch.float32 in NZ does not fill its tiles"),
    "host weight": (lambda m, x: to_nz(torch.zeros(16, 16)), "the weight is a tensor on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_everything_else_is_refused(memory: Memory, what: str) -> None:
    there, (act, message) = memory.empty(4, 8).copy_(NUMBERS), REFUSED[what]
    memory.other = Stream("emulated:1")  # type: ignore[attr-defined]
    with pytest.raises(LoweringError, match=message):
        act(memory, there)
    memory.other.close()  # type: ignore[attr-defined]
    assert torch.equal(there.cpu(), NUMBERS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floats_that_nothing_wrote_are_nan(memory: Memory, dtype: torch.dtype) -> None:
    assert memory.empty(3, 2, dtype=dtype).held.isnan().all()


def test_integers_that_nothing_wrote_have_a_pattern(memory: Memory) -> None:
    assert memory.empty(2, dtype=torch.int32).held.tolist() == [0x5A5A5A5A] * 2
    assert memory.empty(dtype=torch.int64).held.item() == 0x5A5A5A5A5A5A5A5A


def test_bytes_that_nothing_wrote_are_not_copied(memory: Memory) -> None:
    there = memory.empty(4, 8)
    there[0].copy_(NUMBERS[0])
    there[2:].copy_(NUMBERS[2:])
    assert there[2:].cpu().tolist() == NUMBERS[2:].tolist()
    with pytest.raises(LoweringError, match=r"reads bytes 32 to 63 of DeviceTensor.*which nothing was written to"):
        there.cpu()


def test_in_nz_it_is_whole(memory: Memory) -> None:
    weight = memory.empty(32, 32, dtype=torch.bfloat16).copy_(torch.ones(32, 32, dtype=torch.bfloat16))
    tiled = to_nz(weight)
    assert (tiled.shape, tiled.dtype, tiled.allocation.format) == (weight.shape, weight.dtype, NZ)
    assert tiled.data_ptr() != weight.data_ptr()
    assert tiled.detach().allocation.format == NZ
    for act in (lambda: tiled[1:], lambda: tiled.view(1024), lambda: tiled.cpu(), lambda: tiled.zero_(), lambda: weight.copy_(tiled)):
        with pytest.raises(LoweringError, match="legal is ND"):
            act()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12), st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_written_bytes_are_those_that_were_written(intervals: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    written, flags = WrittenBytes(20), [False] * 20
    for start, stop in intervals:
        written.add(start, stop)
        flags[start:stop] = [True] * len(flags[start:stop])
    assert written.full == all(flags)
    start, stop = asked
    missing = [i for i in range(start, stop) if not flags[i]]
    gap = written.first_unwritten(start, stop)
    if not missing:
        assert gap is None
    else:
        first = missing[0]
        last = next((i for i in range(first, stop) if flags[i]), stop)
        assert gap == (first, last)


@pytest.mark.parametrize("length", [4, 16, 40, 64])
def test_what_did_not_arrive_is_found_wherever_it_is(memory: Memory, length: int) -> None:
    there = memory.empty(8, 32, dtype=torch.int8)
    there.zero_()
    memory.stream.record().wait(30)
    part, run = MemoryPart(there, 32, 32 + length), min(length, 16)
    check_arrived([part])
    forget(part)
    # A peer writes it, but for one run.
    content = there.held.flatten()[32 : 32 + length]
    assert not there.held.flatten()[:32].any()
    for first in {0, length // 2 // run * run, length - run}:
        content.zero_()
        content[first : first + run] = 0x5A
        with pytest.raises(
            LoweringError, match=rf"bytes 32 to {31 + length} of .* nothing was written to bytes {32 + first} to {31 + first + run}"
        ):
            check_arrived([part])
    content[first] = 0
    check_arrived([part])


def test_memory_that_a_peer_is_to_write_is_finite(memory: Memory) -> None:
    """Else what is masked of it would spoil what it is masked from."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        there = memory.empty(4, 8, dtype=dtype)
        forget(MemoryPart(there, 0, there.nbytes))
        assert there.held.isfinite().all()
        assert (there.held.float() > 100).all()
