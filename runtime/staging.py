"""The host side of a step's transfers: inputs packed into one copy, outputs into page-locked memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..graphs.types import Aval, Bucket
from ..lowering.device import Device, Event
from .executor import Inputs

ALIGNMENT = 512
"""Bytes that each array's offset is a multiple of: what torch_npu aligns allocations to, so that kernels see what they see otherwise."""


@dataclass(frozen=True)
class PackedLayout:
    """Where named arrays lie in one buffer.

    Attributes:
        avals: shape and dtype by name.
        offsets: first byte of each.
        nbytes: size of the buffer.
    """

    avals: Mapping[str, Aval]
    offsets: Mapping[str, int]
    nbytes: int

    @staticmethod
    def of(avals: Mapping[str, Aval], last: Sequence[str] = ()) -> PackedLayout:
        """Packs arrays in the order given, but for those of `last`, which lie after the others, in that order."""
        offsets, end = {}, 0
        for name in sorted(avals, key=lambda name: last.index(name) if name in last else -1):
            offsets[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = offsets[name] + avals[name].nbytes
        return PackedLayout(avals, offsets, end)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays in a buffer, uint8 [at least nbytes], by name."""
        return {
            name: buffer[self.offsets[name] : self.offsets[name] + aval.nbytes].view(aval.dtype).view(aval.shape)
            for name, aval in self.avals.items()
        }


class InputBuffer:
    """Device memory for the inputs of a step, which all buckets share, and page-locked memory from which it is filled in one copy.

    Args:
        layouts: of every bucket's inputs.
        ahead: how many steps may be queued behind one that is running.
        timeout_s: how long an earlier copy may take; None waits for ever.
    """

    def __init__(self, device: Device, layouts: Mapping[Bucket, PackedLayout], ahead: int, timeout_s: float | None = None) -> None:
        size = max(layout.nbytes for layout in layouts.values())
        self._device, self._layouts, self._timeout_s = device, layouts, timeout_s
        # Zeros: what is not copied is not read, but must be a number.
        self._buffer = device.zeros((size,), torch.uint8)
        self._pinned = [device.pinned(size) for _ in range(ahead + 1)]
        self._copied: list[Event | None] = [None] * len(self._pinned)
        self._next = 0
        self._host = {bucket: [layout.views(pinned) for pinned in self._pinned] for bucket, layout in layouts.items()}
        self.arrays = {bucket: layout.views(self._buffer) for bucket, layout in layouts.items()}

    def pad(self, bucket: Bucket, padding: Mapping[str, float]) -> None:
        """Fills the device's memory for a bucket's inputs with these values by name, inputs that are not among them with zeros.

        Raises:
            LoweringError: as `send`.
        """
        for name, array in self._free(bucket).items():
            array.fill_(padding.get(name, 0))
        self._queue(self._layouts[bucket].nbytes)

    def send(self, bucket: Bucket, inputs: Inputs) -> None:
        """Queues the copy of a step's inputs, arrays by name.

        An array may have fewer rows than the graph's input: what the others hold is not read. Behind the last row of all they are not
        copied.

        Raises:
            LoweringError: the copy that reads this host memory is not over in time, or something before it failed.
        """
        layout, size = self._layouts[bucket], 0
        for name, array in self._free(bucket).items():
            array[: len(inputs[name])].copy_(torch.from_numpy(inputs[name]))
            size = max(size, layout.offsets[name] + inputs[name].nbytes if inputs[name].nbytes else 0)
        self._queue(size)

    def _free(self, bucket: Bucket) -> Mapping[str, torch.Tensor]:
        """A bucket's arrays in the host memory whose turn it is, once the copy that reads it is over."""
        if (copied := self._copied[self._next]) is not None:
            copied.wait(self._timeout_s)
        return self._host[bucket][self._next]

    def _queue(self, size: int) -> None:
        """Queues the copy of so many bytes of that memory."""
        turn, self._next = self._next, (self._next + 1) % len(self._pinned)
        self._buffer[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        self._copied[turn] = self._device.record()


class OutputBuffers:
    """Page-locked memory for the outputs of as many steps as may be queued; each is overwritten when its turn comes again.

    Args:
        layouts: of every bucket's outputs.
        ahead: how many steps may be queued behind one whose outputs are not read.
    """

    def __init__(self, device: Device, layouts: Mapping[Bucket, PackedLayout], ahead: int) -> None:
        size = max(layout.nbytes for layout in layouts.values())
        pinned = [device.pinned(size) for _ in range(ahead + 1)]
        self._next, self._turns = 0, len(pinned)
        self._host = {bucket: [layout.views(memory) for memory in pinned] for bucket, layout in layouts.items()}

    def receive(self, bucket: Bucket, outputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Queues the copies of a step's outputs, in the order of the layout; returns host memory that holds them afterwards."""
        turn, self._next = self._next, (self._next + 1) % self._turns
        arrays = self._host[bucket][turn]
        for array, output in zip(arrays.values(), outputs, strict=True):
            array.copy_(output, non_blocking=True)
        return arrays
