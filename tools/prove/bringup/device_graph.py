"""Runs a graph on a device with operands from the host, a step at a time, and reads what it left behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from ....lowering.ascend.shipped import ShippedGraph, encoding_of
from ....lowering.device import Device
from ....lowering.device_error import named


class Host:
    """Page-locked memory through which tensors go to and from a device; it grows to the largest transfer and is used for all.

    Args:
        timeout_s: how long the device may take for what was queued before it counts as hanging.
        off: switches (`lowering.switches`) that are off.
    """

    def __init__(self, device: Device, directory: Path, timeout_s: float = 60.0, off: frozenset[str] = frozenset()) -> None:
        self.device, self.timeout_s, self.off = device, timeout_s, off
        self._directory, self._numbers = directory, itertools.count()
        self._pinned = device.pinned(1 << 20)

    def write(self, memory: torch.Tensor, value: torch.Tensor) -> None:
        """Copies a host tensor into device memory of its shape and dtype, and waits."""
        if value.numel():
            staged = self._staged(value.shape, value.dtype)
            staged.copy_(value)
            with named(f"a copy to {self.device.name}"):
                memory.copy_(staged, non_blocking=True)
            self.wait()

    def read(self, memory: torch.Tensor) -> torch.Tensor:
        """A copy of device memory on the host, after everything that is queued."""
        if not memory.numel():
            return torch.empty(tuple(memory.shape), dtype=memory.dtype)
        staged = self._staged(memory.shape, memory.dtype)
        with named(f"a copy from {self.device.name}"):
            staged.copy_(memory, non_blocking=True)
        self.wait()
        return staged.clone()

    def wait(self) -> None:
        """Waits for everything that is queued."""
        self.device.record().wait(self.timeout_s)

    def path(self, suffix: str) -> Path:
        """A new file of the scratch directory."""
        return self._directory / f"{next(self._numbers)}.{suffix}"

    def _staged(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        if nbytes > self._pinned.numel():
            self._pinned = self.device.pinned(nbytes)
        return self._pinned[:nbytes].view(dtype).view(tuple(shape))


class DeviceGraph:
    """A graph that is compiled or captured for operands in the device's memory.

    Args:
        operands: initial values, in the order of the graph's operands; those that a matrix product takes as its weight are stored in NZ
            as in serving, and can not be fed again.
        rank, communicators: of this process, for graphs that communicate.
        off: switches that are off besides the host's.

    Raises:
        LoweringError: the device's compiler refuses the graph.
    """

    def __init__(
        self,
        host: Host,
        graph: ShippedGraph,
        operands: Sequence[torch.Tensor],
        rank: int = 0,
        communicators: Mapping[str, str] = MappingProxyType({}),
        *,
        off: frozenset[str] = frozenset(),
    ) -> None:
        self._host, path = host, host.path(graph.suffix)
        path.write_bytes(encoding_of(graph).encode(graph))
        try:
            self._executable = host.device.open(path, rank, communicators)
        finally:
            path.unlink()
        if switches := off | host.off:
            self._executable.switch_off(switches)
        self.nz_operands = self._executable.nz_operands
        self._memory = [self._place(i, operand) for i, operand in enumerate(operands)]
        self._executable.compile(self._memory)

    def _place(self, index: int, operand: torch.Tensor) -> torch.Tensor:
        memory = self._host.device.empty(tuple(operand.shape), operand.dtype)
        self._host.write(memory, operand)
        return self._host.device.to_nz(memory) if index in self.nz_operands else memory

    def feed(self, index: int, value: torch.Tensor) -> None:
        """Writes an operand that is not in NZ."""
        self._host.write(self._memory[index], value)

    def run(self) -> tuple[list[torch.Tensor], float]:
        """Runs one step; returns its results on the host, and the seconds from the launch until the device had finished.

        Raises:
            LoweringError: the device refuses the step, fails in it or does not finish it.
        """
        self._host.wait()
        began = time.perf_counter()
        results = self._executable(self._memory)
        self._host.wait()
        seconds = time.perf_counter() - began
        return [self._host.read(result) for result in results], seconds

    def operands(self, indices: Iterable[int]) -> list[torch.Tensor]:
        """Operands as they are in the device's memory now."""
        return [self._host.read(self._memory[index]) for index in indices]
