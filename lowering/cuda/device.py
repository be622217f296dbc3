"""A GPU as a `Device` (lowering/device.py)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...graphs.errors import LoweringError
from ..device_event import StreamEvent
from . import cuda_file, torch_cuda
from .executable import CudaExecutable
from .torch_cuda import Cuda

CLOSE_S = 5.0

WHEN_LATE = "nvidia-smi and dmesg may tell why (Xid)"


class CudaDevice:
    """One GPU of this process. It becomes the current device of the thread that opens it, which queues everything.

    Args:
        cuda: the GPU.
        index: its number among those that the process sees.
    """

    kind = "cuda"

    def __init__(self, cuda: Cuda, index: int) -> None:
        self._cuda, self.name = cuda, f"cuda:{index}"
        # It names a directory of compiled graphs.
        self.version = torch_cuda.file_name(cuda.version)
        self._entered = threading.local()
        self.enter()

    def enter(self) -> None:
        """Makes it the current device of the calling thread."""
        if not getattr(self._entered, "done", False):
            self._cuda.enter()
            self._entered.done = True

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Row-major memory of the GPU that nothing was written to."""
        return self._cuda.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Row-major memory of the GPU, filled with zeros."""
        return self._cuda.empty(shape, dtype).zero_()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory of the host, uint8 [nbytes]."""
        return self._cuda.pinned(nbytes)

    def to_nz(self, weight: torch.Tensor) -> torch.Tensor:
        """Raises:
        LoweringError: always; a GPU has no such format, and no graph of it asks for one.
        """
        raise LoweringError(f"{self.name} has no format NZ; legal is row-major")

    def record(self) -> StreamEvent:
        """An event behind everything that this thread has queued on its current stream."""
        return StreamEvent(self._cuda.record(), self.name, self.enter, WHEN_LATE)

    def load_packages(self, packages: Sequence[str]) -> None:
        """Raises:
        LoweringError: there are any; operator packages are for NPUs.
        """
        if packages:
            raise LoweringError(f"operator packages {', '.join(packages)} are for NPUs; {self.name} takes none")

    def communicators(self, groups: Mapping[str, Any], rank: int) -> Mapping[str, str]:
        """None for no groups.

        Raises:
            LoweringError: there are groups; artifacts for GPUs are of one device.
        """
        if groups:
            raise LoweringError(f"groups {', '.join(sorted(groups))} need communicators; artifacts for {self.name} are of one device")
        return {}

    def open(self, path: Path, rank: int, communicators: Mapping[str, str]) -> CudaExecutable:
        """Loads a `.cuda` file; nothing is compiled.

        Raises:
            LoweringError: it is no such file, or for another compute capability.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise LoweringError(f"{path}: {error}") from None
        return CudaExecutable(cuda_file.decode(data), self._cuda, self.name)

    def close(self) -> None:
        """Waits for the stream and gives free memory back; what it has not finished in CLOSE_S is left to the end of the process."""
        with suppress(LoweringError):
            self.record().wait(CLOSE_S)
            self._cuda.close()


def open_device(index: int = 0) -> CudaDevice:
    """Opens a GPU of this machine.

    Raises:
        LoweringError: torch has no CUDA, or there is no such GPU.
    """
    if reason := missing():
        raise LoweringError(reason)
    return CudaDevice(torch_cuda.TorchCuda(index), index)


def missing() -> str | None:
    """Why this machine has no GPU to run on; None where it has."""
    return torch_cuda.missing()
