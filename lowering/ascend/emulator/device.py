"""The emulated device: the device path of an NPU on any machine, punishing what a real one would punish.

Its executables go through the code of the real ones (`lowering/ascend/device.py`). Emulated are the engine that compiles and runs a GE
graph, the memory, the stream, and the communicators, which exchange over gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ...device import MemoryPart
from ..acl_graph import file
from ..acl_graph.executable import AclExecutable
from ..device import GeEngine, GeExecutable
from ..ge_file import decode, messages, patched
from .acl_engine import EmulatedAclEngine
from .checks import declared_model
from .communicator import EmulatedCommunicator
from .device_state import DeviceState
from .emulated_graph import EmulatedGraph
from .fault import Fault
from .memory import DeviceTensor, PinnedMemory, allocate, check_arrived, forget, to_nz
from .stream import EmulatedEvent, Stream

VERSION = "emulated-1"
"""Changes whenever compiled graphs of this device would not run on it any more."""


class EmulatedDevice:
    """A device of this process whose graphs an interpreter runs; see `lowering.device.Device`.

    Args:
        index: its number on this machine.
        fault: None has none.
    """

    def __init__(self, index: int, fault: Fault | None = None) -> None:
        self.kind, self.name, self.version = "emulated", f"emulated:{index}", VERSION
        self._state = DeviceState(self.name, Stream(self.name), PinnedMemory(), VERSION, fault=fault)
        self._opened = 0

    def enter(self) -> None:
        """Does nothing: threads have no device."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Row-major memory that nothing was written to; graphs and copies refuse to read it."""
        return allocate(self._state.stream, self._state.pinned, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Row-major memory, filled with zeros."""
        return self.empty(shape, dtype).zero_()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that copies with `non_blocking=True` may read and write; uint8 [nbytes], alive as long as the device."""
        return self._state.pinned.allocate(nbytes)

    def to_nz(self, weight: torch.Tensor) -> torch.Tensor:
        """A device tensor in the format NZ.

        Raises:
            LoweringError: it is no tensor of the device, or its tiles are not filled.
        """
        return to_nz(weight)

    def record(self) -> EmulatedEvent:
        """An event behind everything queued so far."""
        return self._state.stream.record()

    def used_bytes(self) -> int:
        """Memory that GE graphs have taken; tensors lie in the host's."""
        return sum(self._state.feature_maps.blocks)

    def ready(self) -> None:
        """From now on no graph may run for the first time."""
        self._state.serving = True

    def expect(self, parts: Iterable[MemoryPart]) -> None:
        """Makes these parts memory that nothing was written to."""
        for part in parts:
            forget(part)

    def arrived(self, parts: Iterable[MemoryPart]) -> None:
        """Queues a look at these parts; the device fails where nothing was written."""
        expected = list(parts)
        self._state.stream.launch(f"a look at {len(expected)} parts that arrived", lambda: check_arrived(expected))

    def communicators(self, groups: Mapping[str, Any], rank: int) -> dict[str, str]:
        """Names of communicators over gloo process groups; every rank of a group must make this call.

        Raises:
            LoweringError: the ranks of a group do not answer.
        """
        names, self._state.rank = {}, rank
        for symbol, group in sorted(groups.items()):
            communicator = EmulatedCommunicator(symbol, group, rank)
            communicator.name = names[symbol] = f"emulated/{symbol}/{communicator.ranks[0]}"
            self._state.communicators[communicator.name] = communicator
        return names

    def load_packages(self, packages: Sequence[str]) -> None:
        """It has the operators of all packages."""

    def open(self, path: Path, rank: int, communicators: Mapping[str, str]) -> GeExecutable | AclExecutable:
        """Loads a `.ge` or `.aclgraph` file for a rank; nothing is compiled.

        Raises:
            LoweringError: the file is neither, contradicts itself, or needs a communicator that there is none of.
        """
        if path.suffix == f".{file.SUFFIX}":
            acl_file = file.decode(path.read_bytes())
            self._opened += 1
            acl_engine = EmulatedAclEngine(self._state, communicators, acl_file.graph, f"npucompile_{self._opened}")
            return AclExecutable(acl_file, acl_engine, rank, communicators)
        ge_file = patched(decode(path.read_bytes()), rank, communicators)
        declared_model(ge_file)
        return GeExecutable(ge_file, engine(self._state), self.version)

    def close(self) -> None:
        """Waits for the stream and ends it."""
        self._state.stream.close()
        self._state.updates.close()


def engine(state: DeviceState) -> GeEngine:
    """The engine of a device, in place of torchair's."""
    return GeEngine(
        graph=functools.partial(EmulatedGraph, state),
        initialize=functools.partial(_initialize, state),
        update_constants=_update_constants,
        update_formats=EmulatedGraph.bind,
        device=state.name,
        place=lambda tensor: tensor.allocation.stream.name if isinstance(tensor, DeviceTensor) else tensor.device.type,
    )


def _initialize(state: DeviceState, options: dict[str, str]) -> None:
    """Starts the engine once; like torchair, refuses other options afterwards."""
    if state.options is None:
        state.options = dict(options)
    if differing := sorted(name for name in {*options, *state.options} if options.get(name) != state.options.get(name)):
        listed = ", ".join(f"{name} is {options.get(name)!r} and was {state.options.get(name)!r}" for name in differing)
        raise ValueError(f"the engine of {state.name} runs already, and {listed}")


def _update_constants(graph: Any, inputs: Sequence[torch.Tensor | None]) -> None:
    if names := [op.name for op in graph.op if op.type == "ConstPlaceHolder"]:
        raise LoweringError(f"{', '.join(names)} stand for operands as constants, which the emulated device does not know; legal is Data")


def open_device(index: int) -> EmulatedDevice:
    """Opens an emulated device; one process may have several.

    Raises:
        LoweringError: torch_npu's messages of GE graphs are not installed.
    """
    messages()
    return EmulatedDevice(index)


def missing() -> str | None:
    """None: every machine can emulate a device, given the messages of GE graphs.

    Raises:
        LoweringError: these are not installed.
    """
    messages()
    return None
