"""What a GPU's device needs of torch: memory, one stream with events, AOTInductor's compiler and loader, and CUDA graphs.

It is written against torch's sources and interfaces, and has not run on a GPU (docs/cuda.md). Everything else of the device goes through
the protocol here, so that it is tested on machines without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ...graphs.errors import LoweringError
from ..device_event import Recorded
from . import compiler

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled graph: operands on the GPU -> outputs there; state operands are written in place."""


class Captured(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None:
        """Queues it, over the memory that it was captured with."""
        ...


class Cuda(Protocol):
    """One GPU of this process, its current stream, and the compiler."""

    version: str
    chip: str
    arch: str

    def enter(self) -> None:
        """Makes it the current device of the calling thread."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the GPU."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, uint8 [nbytes]."""
        ...

    def place(self, tensor: torch.Tensor) -> str:
        """Where a tensor lies."""
        ...

    def record(self) -> Recorded:
        """An event behind everything that this thread has queued."""
        ...

    def compile(self, graph: bytes, reads: Sequence[int], name: str, directory: Path) -> Path:
        """Compiles a serialised graph into a file in the directory."""
        ...

    def load(self, package: Path) -> Run:
        """Loads a file that `compile` made."""
        ...

    def capture(self, run: Run, operands: Sequence[torch.Tensor]) -> tuple[Captured, list[torch.Tensor]]:
        """Runs a graph until it allocates and chooses nothing new, and captures it; its outputs keep their addresses."""
        ...

    def close(self) -> None:
        """Gives free memory back."""
        ...


WARM_UPS = 2
"""Runs before a capture, as torch's notes on CUDA graphs ask for: the first loads modules and creates cuBLAS handles, which is illegal in
one."""


class TorchCuda:
    """A GPU by torch.cuda; see `Cuda`.

    Args:
        index: number of the GPU among those that the process sees (CUDA_VISIBLE_DEVICES).

    Raises:
        LoweringError: there is no such GPU.
    """

    def __init__(self, index: int) -> None:
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise LoweringError(f"there is no cuda:{index}: this process sees {count} GPUs; legal is 0 to {count - 1}")
        self._device = torch.device("cuda", index)
        self._pool: Any = None
        self.enter()
        self.chip = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        self.arch = f"{major}{minor}"
        self.version = f"cuda-{torch.version.cuda}-torch-{torch.__version__}-{self.chip}"

    def enter(self) -> None:
        """Makes it the current device of the calling thread."""
        torch.cuda.set_device(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the GPU."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, uint8 [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def place(self, tensor: torch.Tensor) -> str:
        """Where a tensor lies."""
        return str(tensor.device)

    def record(self) -> Recorded:
        """An event behind everything that this thread has queued on its current stream."""
        event = torch.cuda.Event()
        event.record()
        recorded: Recorded = event
        return recorded

    def compile(self, graph: bytes, reads: Sequence[int], name: str, directory: Path) -> Path:
        """Compiles a serialised graph with AOTInductor, see compiler.py."""
        return compiler.compile_package(graph, reads, name, directory, self._device)

    def load(self, package: Path) -> Run:
        """Loads a package without its own locks and events between threads, which a capture refuses."""
        loader = torch._C._aoti.AOTIModelPackageLoader(str(package), compiler.MODEL, True, 1, self._device.index)
        return lambda operands: loader.run(operands)  # type: ignore[arg-type]  # pybind takes any sequence, and has a default

    def capture(self, run: Run, operands: Sequence[torch.Tensor]) -> tuple[Captured, list[torch.Tensor]]:
        """Warms up on a stream of its own and captures there; all graphs of the device share one pool of memory.

        They may, because they are replayed one at a time, and who launches copies a graph's outputs before the next is replayed.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run(operands)
        side.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=self._pool, stream=side):
            outputs = list(run(operands))
        torch.cuda.synchronize(self._device)
        return captured, outputs

    def close(self) -> None:
        """Gives free memory back."""
        torch.cuda.empty_cache()


def missing() -> str | None:
    """Why this process has no GPU to run on; None where it has."""
    release = str(torch.__version__).partition("+")[0]
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install torch {release} from PyTorch's index of CUDA wheels"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, and the driver shows no GPU; nvidia-smi should list one"
    return None


def file_name(version: str) -> str:
    """A version as the name of a directory."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", version)
