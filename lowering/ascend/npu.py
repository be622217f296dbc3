"""An NPU as a `Device` (lowering/device.py): its memory, its current stream, HCCL's communicators, and GE's executables.

Written against the sources and the signatures of torch_npu; it has not run on a machine with CANN (docs/on-hardware.md).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import LoweringError
from ..device import MemoryPart
from ..device_error import named
from ..device_event import StreamEvent
from . import device as ge
from . import packages as operator_packages
from .acl_graph import file
from .acl_graph.executable import AclExecutable
from .acl_graph.npu_engine import AclMemory, NpuAclEngine
from .legality.running import chip_of
from .toolchain import harness
from .toolchain.harness import Torchair
from .toolchain.stubs import cann

log = logging.getLogger(__name__)

CLOSE_S = 5.0
_DEVICE_FILES = Path("/dev")

WHEN_LATE = (
    "a rank that is late or lost in a collective looks like this: HCCL's plog of this process names the communicator "
    "(ASCEND_PROCESS_LOG_PATH)"
)


class NpuDevice:
    """One NPU of this process. It becomes the current device of the thread that opens it, which queues everything.

    Args:
        torchair: loaded with CANN.
        index: number of the NPU among those that the process sees (ASCEND_RT_VISIBLE_DEVICES).

    Raises:
        LoweringError: there is no CANN, or no such NPU.
    """

    kind = "npu"

    def __init__(self, torchair: Torchair, index: int) -> None:
        ge.engine(torchair)  # refuses stub libraries, which end the process at the first call
        self._torchair, self._torch_npu, self._index = torchair, torchair.torch_npu, index
        self.name = f"npu:{index}"
        count = self._torch_npu.npu.device_count()
        if not 0 <= index < count:
            raise LoweringError(f"there is no {self.name}: this process sees {count} NPUs; legal is 0 to {count - 1}")
        self._entered = threading.local()
        self._acl_memory: AclMemory | None = None
        self.enter()
        # Off by default, and npu_format_cast then has nothing to cast to; update_formats tells GE of each operand's format.
        self._torch_npu.npu.config.allow_internal_format = True
        release, chip = self._torch_npu.npu.utils.get_cann_version(), self._torch_npu.npu.get_device_name(index)
        # It names a directory of compiled graphs.
        self.version = re.sub(r"[^A-Za-z0-9._-]+", "-", f"cann-{release}-{chip}")

    def enter(self) -> None:
        """Makes it the current device of the calling thread."""
        if not getattr(self._entered, "done", False):
            self._torch_npu.npu.set_device(self._index)
            self._entered.done = True

    @property
    def torch_npu(self) -> Any:
        """The module, from which `hccl.group_maker` makes process groups."""
        return self._torch_npu

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Row-major memory of the NPU that nothing was written to."""
        with named(f"allocating on {self.name}"):
            return torch.empty(tuple(shape), dtype=dtype, device=self.name)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Row-major memory of the NPU, filled with zeros."""
        with named(f"allocating on {self.name}"):
            return torch.zeros(tuple(shape), dtype=dtype, device=self.name)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory of the host, uint8 [nbytes]."""
        with named("allocating page-locked memory"):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def to_nz(self, weight: torch.Tensor) -> torch.Tensor:
        """A device tensor in the format NZ.

        Raises:
            LoweringError: torch_npu left it in another format.
        """
        with named(f"a cast to NZ on {self.name}"):
            cast = ge.to_nz(self._torch_npu, weight)
        if (actual := int(self._torch_npu.get_npu_format(cast))) != ge.FRACTAL_NZ:
            raise LoweringError(f"a weight {tuple(weight.shape)} {weight.dtype} is in format {actual} after a cast to {ge.FRACTAL_NZ} (NZ)")
        return cast

    def record(self) -> StreamEvent:
        """An event behind everything that this thread has queued on its current stream."""
        event = self._torch_npu.npu.Event()
        event.record()
        return StreamEvent(event, self.name, self.enter, WHEN_LATE)

    def used_bytes(self) -> int:
        """Memory of the NPU that is in use, by whomever."""
        free, total = self._torch_npu.npu.mem_get_info(self._index)
        return int(total - free)

    def ready(self) -> None:
        """Does nothing: an NPU does not know."""

    def expect(self, parts: Iterable[MemoryPart]) -> None:
        """Does nothing: links write the NPU's memory without it."""

    def arrived(self, parts: Iterable[MemoryPart]) -> None:
        """Does nothing: kernels that are launched afterwards read what the links have written."""

    def communicators(self, groups: Mapping[str, Any], rank: int) -> Mapping[str, str]:
        """HCCL's names of the communicators of these groups; every rank of a group must make this call."""
        with named(f"making the communicators of rank {rank}"):
            return ge.communicators(groups, rank)

    def load_packages(self, packages: Sequence[str]) -> None:
        """Loads operator packages; refuses those that are not installed, or lack an operator that graphs may call or its kernels."""
        operator_packages.load(packages, chip_of(self.version))

    def open(self, path: Path, rank: int, communicators: Mapping[str, str]) -> ge.GeExecutable | AclExecutable:
        """Loads a `.ge` or `.aclgraph` file for a rank; nothing is compiled."""
        if path.suffix == f".{file.SUFFIX}":
            if self._acl_memory is None:
                self._acl_memory = AclMemory.of(self._torch_npu, self.name, self.enter)
            acl_engine = NpuAclEngine(self._torch_npu, self.name, self._acl_memory)
            return AclExecutable(file.decode(path.read_bytes()), acl_engine, rank, communicators)
        return ge.load(path, self._torchair, rank, communicators, self.version)

    def close(self) -> None:
        """Waits for the NPU and gives its free memory back; what it has not finished in CLOSE_S is left to the end of the process.

        A device that has failed fails here again: that is logged, for what made it fail has been raised by the step.
        """
        updates = [] if self._acl_memory is None else [self._acl_memory.updates.close]
        for what in (*updates, lambda: self.record().wait(CLOSE_S), self._torch_npu.npu.empty_cache):
            try:
                what()
            except (LoweringError, RuntimeError) as error:
                log.warning("%s was closed after a failure: %s", self.name, error)
                return


def open_device(index: int = 0) -> NpuDevice:
    """Opens an NPU of this machine; torch_npu is imported here, so the environment must be complete.

    Raises:
        LoweringError: there is no CANN, no torch_npu that fits torch, or no such NPU.
    """
    if reason := missing():
        raise LoweringError(reason)
    # With CANN no stub libraries are made, so nothing is written to the directory.
    return NpuDevice(harness.load(Path()), index)


def missing() -> str | None:
    """Why this machine has no NPU to run on; None where it has. Nothing is imported."""
    if reason := harness.lacking(harness.installed()):
        return reason
    if cann(None) is None:
        return "running on an NPU needs CANN, and this machine has none; install it and source its set_env.sh"
    if not any(re.fullmatch(r"davinci\d+", path.name) for path in _DEVICE_FILES.glob("davinci*")):
        return "the Ascend driver shows no /dev/davinci0; in a container, pass the devices in"
    return None
