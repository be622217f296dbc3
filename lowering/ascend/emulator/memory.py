"""Memory of an emulated device, as tensors that the host can only copy to and from.

Every byte remembers whether it was written: nothing may be read before. Memory that was never written holds NaN, or for integers a
pattern that is easy to recognise.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ....graphs.errors import LoweringError
from ...device import MemoryPart
from ..acl_graph.formats import fills_tiles
from ..convert import shape_of
from .stream import Stream

ND, NZ = 2, 29
"""ACL's numbers of row-major memory and of the tiled format of matrix units (ACL_FORMAT_ND, ACL_FORMAT_FRACTAL_NZ)."""
FORMAT_NAMES = {ND: "ND", NZ: "NZ"}
_PATTERN, _RUN_BYTES = 0x5A, 16
_ATEN = torch.ops.aten
_VIEWS = {
    _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.view.dtype, _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.as_strided.default,
    _ATEN.detach.default, _ATEN.alias.default, _ATEN.unsqueeze.default, _ATEN.squeeze.default, _ATEN.squeeze.dim,
}  # fmt: skip


class WrittenBytes:
    """Which bytes of an allocation were written, as disjoint intervals in order."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.full = not nbytes

    def add(self, start: int, stop: int) -> None:
        """Marks bytes `start` to `stop` - 1."""
        if self.full or start >= stop:
            return
        first, last = bisect.bisect_left(self._stops, start), bisect.bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]
        self.full = (self._starts, self._stops) == ([0], [self.nbytes])

    def first_unwritten(self, start: int, stop: int) -> tuple[int, int] | None:
        """The first interval of bytes from `start` to `stop` - 1 that nothing was written to."""
        if self.full or start >= stop:
            return None
        i = bisect.bisect_right(self._starts, start) - 1
        if i >= 0 and self._stops[i] > start:
            if self._stops[i] >= stop:
                return None
            start = self._stops[i]
        following = self._starts[i + 1] if i + 1 < len(self._starts) else stop
        return start, min(following, stop)


class Allocation:
    """A piece of memory of one device.

    Attributes:
        stream: of the device.
        address: of its first byte.
        format: `ND` or `NZ`.
        written: changed by the stream alone, like the contents.
    """

    def __init__(self, stream: Stream, memory: torch.Tensor, memory_format: int = ND) -> None:
        self.stream, self.memory, self.format = stream, memory, memory_format
        self.address = memory.data_ptr()
        self.written = WrittenBytes(memory.nbytes)


class PinnedMemory:
    """Host memory that a device may copy to and from while the host goes on."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory, uint8 [nbytes], until the device is closed."""
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._storages[memory.untyped_storage().data_ptr()] = memory.untyped_storage()
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor lies in it."""
        return tensor.untyped_storage().data_ptr() in self._storages


def _host_reader(how: str) -> Any:
    def read(tensor: DeviceTensor, *args: object, **kwargs: object) -> Any:
        """Refuses to hand values to the host."""
        raise _host_read(tensor, how)

    return read


class DeviceTensor(torch.Tensor):
    """A tensor in a device's memory. There are no kernels but copies and fills: operators run in graphs alone.

    Its torch device is "meta", since torch knows no device of this kind; `allocation` says where it lies.
    """

    allocation: Allocation
    held: torch.Tensor
    pinned: PinnedMemory
    tolist, numpy, item, __array__ = (_host_reader(how) for how in ("tolist()", "numpy()", "item()", "numpy()"))
    _HOST_READS: ClassVar[set[Any]] = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default}

    @staticmethod
    def __new__(cls, allocation: Allocation, held: torch.Tensor, pinned: PinnedMemory) -> DeviceTensor:
        """Wraps `held`, a view of the allocation's memory, for the stream."""
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=torch.device("meta")
        )
        tensor.allocation, tensor.held, tensor.pinned = allocation, held, pinned
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has an argument for its own subclasses
        where = f"{self.allocation.stream.name} at {self.data_ptr():#x}"
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {FORMAT_NAMES[self.allocation.format]}, {where})"

    def data_ptr(self) -> int:
        """Address of the first element in the memory of the device."""
        return self.held.data_ptr()

    def byte_runs(self) -> Iterator[tuple[int, int]]:
        """Intervals of the allocation's bytes that the tensor lies in."""
        return _byte_runs(self.held, self.data_ptr() - self.allocation.address)

    def unwritten(self) -> tuple[int, int] | None:
        """The first interval of the allocation's bytes that the tensor lies in and nothing was written to; for the stream."""
        written = self.allocation.written
        if written.full:
            return None
        return next((gap for start, stop in self.byte_runs() if (gap := written.first_unwritten(start, stop)) is not None), None)

    def mark_written(self) -> None:
        """Notes that all its bytes were written; for the stream."""
        if not self.allocation.written.full:
            for start, stop in self.byte_runs():
                self.allocation.written.add(start, stop)

    def read(self, name: str) -> torch.Tensor:
        """Its contents as an operand of a graph; for the stream.

        Raises:
            LoweringError: a part of it was never written.
        """
        if (gap := self.unwritten()) is not None:
            raise LoweringError(f"operand {name}: nothing was written to its bytes {gap[0]} to {gap[1] - 1}; legal is all of them")
        return self.held

    def write(self, value: torch.Tensor, what: str) -> None:
        """Takes a result of a graph; for the stream.

        Raises:
            LoweringError: it is of another shape or dtype than the graph says.
        """
        if (value.dtype, value.shape) != (self.dtype, self.shape):
            raise LoweringError(f"{what} is {shape_of(value)}; the graph says {shape_of(self)}")
        self.held.copy_(value)
        self.mark_written()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the function that turns it off
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            return _view(func, args, kwargs)
        if func is _ATEN.copy_.default:
            return _copy(*args, **kwargs)
        if func in (_ATEN.zero_.default, _ATEN.fill_.Scalar):
            return _fill(args[0], args[1] if len(args) > 1 else 0)
        if func is _ATEN._to_copy.default:
            return _to_host(args[0], **kwargs)
        tensor = next(value for value in args if isinstance(value, DeviceTensor)) if _direct(args) else None
        if func in cls._HOST_READS and tensor is not None:
            raise _host_read(tensor, str(func))
        where = tensor.allocation.stream.name if tensor is not None else "the emulated device"
        raise LoweringError(f"{func} on a tensor of {where}: operators run in graphs alone; legal are copy_, zero_, fill_ and views")


def _direct(args: Sequence[Any]) -> bool:
    return any(isinstance(value, DeviceTensor) for value in args)


def allocate(stream: Stream, pinned: PinnedMemory, shape: Sequence[int], dtype: torch.dtype) -> DeviceTensor:
    """Row-major memory that nothing was written to."""
    memory = torch.empty(tuple(shape), dtype=dtype)
    if dtype.is_floating_point:
        memory.fill_(float("nan"))
    elif dtype != torch.bool:
        memory.view(torch.uint8).fill_(_PATTERN) if memory.dim() else memory.reshape(1).view(torch.uint8).fill_(_PATTERN)
    else:
        memory.fill_(True)
    return DeviceTensor(Allocation(stream, memory), memory, pinned)


def forget(part: MemoryPart) -> None:
    """Fills a part of a tensor with the pattern of memory that was never written, at once and past the stream, as peers write it.

    Graphs read a pool as a whole, so it is no part that they must not read. A value of the pattern spoils what depends on it, and not
    what is masked.
    """
    _bytes_of(part).fill_(_PATTERN)


def check_arrived(parts: Sequence[MemoryPart]) -> None:
    """Looks for the pattern in parts that peers were to write; for the stream.

    Raises:
        LoweringError: a run of 16 bytes, or all of a shorter part, has it.
    """
    for part in parts:
        content = _bytes_of(part)
        size = min(_RUN_BYTES, len(content))
        whole = len(content) // size * size
        runs = torch.cat([content[:whole], content[-size:]]).view(-1, size)
        left = (runs == _PATTERN).all(1)
        if left.any():
            first = min(int(left.nonzero()[0]) * size, len(content) - size) + part.start
            raise LoweringError(
                f"bytes {part.start} to {part.stop - 1} of {part.tensor!r} were to come from a peer, and nothing was written to bytes"
                f" {first} to {first + size - 1}; legal is all of them"
            )


def _bytes_of(part: MemoryPart) -> torch.Tensor:
    tensor = part.tensor
    assert isinstance(tensor, DeviceTensor)
    return tensor.held.flatten().view(torch.uint8)[part.start : part.stop]


def to_nz(weight: torch.Tensor) -> DeviceTensor:
    """A tensor of the device in the format NZ.

    Raises:
        LoweringError: it is no tensor of the device, or some tile of 16 rows of 32 bytes is not filled.
    """
    if not isinstance(weight, DeviceTensor):
        raise LoweringError(f"the weight is a tensor on {weight.device}; legal is one of the emulated device")
    # Otherwise it would be larger than the memory plan says.
    if not fills_tiles(weight):
        raise LoweringError(
            f"{tuple(weight.shape)} {weight.dtype} in NZ does not fill its tiles; legal are multiples of 16 rows of 32 bytes, of values"
            " of one or two bytes, or of int32 words of int4"
        )
    pinned, stream = weight.pinned, weight.allocation.stream
    tiled = allocate(stream, pinned, weight.shape, weight.dtype)
    _copy(tiled, weight)
    tiled.allocation.format = NZ
    return tiled


def _host_read(tensor: DeviceTensor, how: str) -> LoweringError:
    return LoweringError(
        f"{how} of {tensor!r} is a host read inside a step; legal is copy_ into pinned memory with non_blocking=True, then an event"
    )


def _view(func: Any, args: Any, kwargs: Any) -> DeviceTensor:
    tensor: DeviceTensor = args[0]
    if tensor.allocation.format == NZ and func not in (_ATEN.detach.default, _ATEN.alias.default):
        raise LoweringError(f"{func} of {tensor!r}: a part of a tensor in NZ is not a tensor; legal is ND")
    return DeviceTensor(tensor.allocation, func(tensor.held, *args[1:], **kwargs), tensor.pinned)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    device = target if isinstance(target, DeviceTensor) else source
    assert isinstance(device, DeviceTensor)
    stream = device.allocation.stream
    _check_copy(target, source, stream)
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        stream.launch(f"a copy {source!r} -> {target!r}", lambda: _move(target, source))
        return target
    host = source if device is target else target
    if non_blocking and not (device.pinned.holds(host) and host.is_contiguous() and device.is_contiguous()):
        raise LoweringError(
            f"a copy between {device!r} and {tuple(host.shape)} {host.dtype} of the host with non_blocking=True: one of them is not"
            " contiguous or the host's memory is not pinned; legal is memory of the device's pinned()"
        )
    if device is source and not non_blocking and not stream.idle():
        raise _host_read(device, "copy_ without non_blocking")
    queued = stream.launch if non_blocking else stream.run
    queued(f"a copy {'to' if device is target else 'from'} {device!r}", lambda: _move(target, source))
    return target


def _check_copy(target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        raise LoweringError(
            f"a copy of {tuple(source.shape)} {source.dtype} into {tuple(target.shape)} {target.dtype}; legal is the same shape and dtype"
        )
    for tensor in (target, source):
        if isinstance(tensor, DeviceTensor):
            if tensor.allocation.stream is not stream:
                raise LoweringError(f"a copy between {stream.name} and {tensor!r}; legal is one device")
            if tensor.allocation.format != ND:
                raise LoweringError(f"a copy of {tensor!r}; legal is ND: a tensor in NZ is made by to_nz and read by graphs alone")
        elif tensor.device.type != "cpu":
            raise LoweringError(f"a copy between {stream.name} and a tensor on {tensor.device}; legal is the CPU")


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    """The copy itself, on the stream: host memory is read and written now, not when the copy was queued."""
    if isinstance(source, DeviceTensor):
        if (gap := source.unwritten()) is not None:
            raise LoweringError(f"it reads bytes {gap[0]} to {gap[1] - 1} of {source!r}, which nothing was written to")
        source = source.held
    with torch.no_grad():
        if isinstance(target, DeviceTensor):
            target.held.copy_(source)
            target.mark_written()
        else:
            target.copy_(source)


def _fill(target: DeviceTensor, value: float) -> DeviceTensor:
    if target.allocation.format != ND:
        raise LoweringError(f"a fill of {target!r}; legal is ND")

    def job() -> None:
        target.held.fill_(value)
        target.mark_written()

    target.allocation.stream.launch(f"a fill of {target!r}", job)
    return target


def _to_host(tensor: DeviceTensor, **kwargs: Any) -> torch.Tensor:
    device, dtype = kwargs.get("device"), kwargs.get("dtype") or tensor.dtype
    if device is None or device.type != "cpu" or dtype != tensor.dtype:
        raise LoweringError(f"a copy of {tensor!r} as {dtype} to {device}; legal is the CPU, without a change of dtype")
    return _copy(torch.empty(tensor.shape, dtype=dtype), tensor)


def _byte_runs(held: torch.Tensor, first: int) -> Iterator[tuple[int, int]]:
    item = held.element_size()
    sizes, strides, run = list(held.shape), list(held.stride()), item
    if 0 in sizes:
        return
    # Inner dimensions that lie side by side make one run.
    while sizes and (sizes[-1] == 1 or strides[-1] * item == run):
        run *= sizes.pop()
        strides.pop()
    for position in itertools.product(*map(range, sizes)):
        start = first + item * sum(i * stride for i, stride in zip(position, strides, strict=True))
        yield start, start + run
