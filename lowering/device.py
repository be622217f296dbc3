"""The protocol of a device whose memory is not the host's: allocation, one stream, communicators, and executables.

Operands of its executables are torch tensors in the device's memory. They are filled and read by `copy_` alone: a copy to the device from
`pinned` memory, or from the device into it, with `non_blocking=True`, is queued on the stream like a step, and the host sees its result
once an event that was recorded behind it has come.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..graphs.errors import LoweringError, SpecError
from ..graphs.types import Leaf
from .executable import Executable

CPU, NPU, EMULATED = "cpu", "npu", "emulated"
KINDS = (CPU, NPU, EMULATED)
"""What `--device` accepts besides "auto"."""

_MODULES = {NPU: "ascend.npu", EMULATED: "ascend.emulator.device"}


class Event(Protocol):
    """A place in the stream of a device, behind everything that was queued before it was recorded."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the stream has passed it.

        Raises:
            LoweringError: something queued before it failed, or the time is over; says what the device was running, where it can.
        """
        ...


class DerivedValue(NamedTuple):
    """An operand that is computed from parameters when they are loaded.

    Attributes:
        expression: how; equal expressions give equal values, in all executables of an artifact.
        sources: operands that it is computed from.
    """

    expression: str
    sources: tuple[int, ...]


class MemoryPart(NamedTuple):
    """Bytes `start` to `stop` - 1 of a tensor in the device's memory."""

    tensor: torch.Tensor
    start: int
    stop: int


class DeviceExecutable(Executable, Protocol):
    """An executable on a device, opened for one rank. A call queues the step and returns its outputs, which are not computed yet.

    Its operands are those of its signature, then the derived values.
    """

    def switch_off(self, switches: Collection[str]) -> None:
        """Does without these (`switches.SWITCHES`) from now on, before anything else is asked of it."""
        ...

    def derived(self, params: Sequence[Leaf]) -> tuple[DerivedValue, ...]:
        """The derived values, in the order of operands.

        Args:
            params: the artifact's parameters.
        """
        ...

    def derive(self, number: int, params: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Computes one of them in host memory, from parameters in host memory; None where it is not computed from one."""
        ...

    @property
    def reads(self) -> frozenset[int]:
        """Operands that the graph takes; others need not be on the device."""
        ...

    @property
    def nz_operands(self) -> frozenset[int]:
        """Operands that this graph wants in the tiled format NZ; all others are row-major (ND)."""
        ...

    def warm_up(self, operands: Sequence[torch.Tensor | None]) -> None:
        """Queues what must have run before `compile`, with the same operands: operators whose launches are going to be captured.

        Raises:
            LoweringError: as `compile`.
        """
        ...

    def __call__(self, operands: Sequence[torch.Tensor | None], /) -> list[torch.Tensor]:
        """Queues one step; its operands are those that it was compiled for."""
        ...

    def compile(self, operands: Sequence[torch.Tensor | None], cache_dir: Path | None = None) -> bool:
        """Compiles the graph for these operands, whose memory and formats never change afterwards.

        Args:
            operands: as for a call; None where the graph does not read one.
            cache_dir: an existing directory of compiled graphs that outlives the process; None keeps none.

        Returns:
            Whether it was compiled; False where the cache had it.

        Raises:
            LoweringError: the device's compiler refuses the graph, or an operand is not what the graph needs.
        """
        ...


class Device(Protocol):
    """One device of this process.

    Attributes:
        kind: "npu" or "emulated".
        name: with its number on this machine, e.g. "npu:3".
        version: what compiled graphs depend on besides the graph: release of the compiler and name of the chip.
    """

    kind: str
    name: str
    version: str

    def enter(self) -> None:
        """Makes it the current device of the calling thread."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Row-major memory of the device that nothing was written to."""
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Row-major memory of the device, filled with zeros."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory of the host, uint8 [nbytes]."""
        ...

    def to_nz(self, weight: torch.Tensor) -> torch.Tensor:
        """A device tensor in the format NZ: same shape, dtype and values in another memory order."""
        ...

    def record(self) -> Event:
        """An event behind everything queued so far."""
        ...

    def used_bytes(self) -> int:
        """Memory of the device that is in use."""
        ...

    def ready(self) -> None:
        """Says that steps are served from now on: what executables do at their first run has been done."""
        ...

    def expect(self, parts: Iterable[MemoryPart]) -> None:
        """Says that other devices are going to write these parts past the stream; nothing that is queued uses them."""
        ...

    def arrived(self, parts: Iterable[MemoryPart]) -> None:
        """Says that they were written, for what is queued from now on.

        Raises:
            LoweringError: the device has failed.
        """
        ...

    def load_packages(self, packages: Sequence[str]) -> None:
        """Makes the operators of packages ready, before graphs that were built for them are opened.

        Args:
            packages: of the artifact's platform (`lowering.platform.Platform`).

        Raises:
            LoweringError: naming the packages and operators that this machine lacks.
        """
        ...

    def communicators(self, groups: Mapping[str, Any], rank: int) -> Mapping[str, str]:
        """Names of the communicators of process groups; every rank of a group must make this call.

        Args:
            groups: process group by its symbol in GE graphs (`ge_file.GROUPS`), of this device's kind (runtime/distributed).
            rank: number of this process among all.
        """
        ...

    def open(self, path: Path, rank: int, communicators: Mapping[str, str]) -> DeviceExecutable:
        """Loads an executable for a rank; nothing is compiled.

        Raises:
            LoweringError: the file is no executable of this device, or needs a communicator that there is none of.
        """
        ...

    def close(self) -> None:
        """Waits for the stream and frees the device."""
        ...


def open_device(kind: str, index: int = 0) -> Device:
    """Opens a device of this machine, after the environment of the process is complete.

    Args:
        kind: "npu" or "emulated".
        index: its number on this machine.

    Raises:
        SpecError: there is no such kind.
        LoweringError: there is no such device here, saying what is missing.
    """
    if kind not in _MODULES:
        raise SpecError(f"device is {kind!r}; legal are {', '.join(_MODULES)}")
    module = importlib.import_module(f".{_MODULES[kind]}", __package__)
    device: Device = module.open_device(index)
    return device


def missing(kind: str) -> str | None:
    """Why this machine has no device of that kind; None where it has."""
    if kind not in _MODULES:
        return None
    try:
        reason: str | None = importlib.import_module(f".{_MODULES[kind]}", __package__).missing()
    except LoweringError as error:
        return str(error)
    return reason
