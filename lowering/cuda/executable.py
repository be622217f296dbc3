"""Runs a `.cuda` file on a GPU: compiled where no cache has it, captured once over operands that never move, and replayed."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ...graphs.errors import LoweringError
from ...graphs.types import Leaf
from ..artifact import graph_io
from ..device import DerivedValue
from .cuda_file import CudaFile, capability
from .torch_cuda import Captured, Cuda


class CudaExecutable:
    """One step of one bucket on a GPU; see `lowering.device.DeviceExecutable`.

    Outputs lie at the same addresses in every step, and other buckets' graphs may use their memory: who launches copies them before it
    launches the next.

    Args:
        cuda_file: the graph.
        cuda: the GPU that runs it.
        name: of the device.

    Raises:
        LoweringError: the graph is for another compute capability, or cannot be read.
    """

    backend = "inductor_cuda"
    nz_operands: frozenset[int] = frozenset()

    def __init__(self, cuda_file: CudaFile, cuda: Cuda, name: str) -> None:
        if cuda_file.arch != cuda.arch:
            raise LoweringError(
                f"the graph is for compute capability {capability(cuda_file.arch)}, and {name} ({cuda.chip}) has {capability(cuda.arch)}; "
                f"legal is a GPU of that capability, or a build with --cuda-arch {cuda.arch}"
            )
        self._graph, self._cuda, self._name = cuda_file.graph, cuda, name
        nodes = graph_io.decode(cuda_file.graph).graph.nodes
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        self._operands: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._captured: Captured | None = None

    @functools.cached_property
    def reads(self) -> frozenset[int]:
        """Operands that the graph takes."""
        return frozenset(position for position, node in enumerate(self._placeholders) if node.users)

    def derived(self, params: Sequence[Leaf]) -> tuple[DerivedValue, ...]:
        """None: nothing is computed when weights are loaded."""
        return ()

    def derive(self, number: int, params: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Raises:
        LoweringError: always, there are none.
        """
        raise LoweringError(f"derived value {number} of a graph that has none")

    def compile(self, operands: Sequence[torch.Tensor | None], cache_dir: Path | None = None) -> bool:
        """Compiles the graph unless the cache has it, and captures it over these operands.

        The warm-up runs it: pools are written as by a step of padding, which writes the null page and slot alone, where the inputs are
        zeros.

        Raises:
            LoweringError: it is compiled already, an operand is not what the graph takes, or the compiler or the capture fails.
        """
        if self._captured is not None:
            raise LoweringError("the graph is compiled already; legal is once")
        self._check(operands)
        taken = [value for position in sorted(self.reads) if (value := operands[position]) is not None]
        with ExitStack() as stack:
            directory = cache_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="npucompile-cuda-")))
            package = directory / f"{self.key}.pt2"
            if fresh := not package.is_file():
                # Renamed when it is whole, so that an interrupted compile leaves nothing that is loaded.
                self._cuda.compile(self._graph, sorted(self.reads), f"g_{self.key}", directory).replace(package)
            try:
                self._captured, self._outputs = self._cuda.capture(self._cuda.load(package), taken)
            except RuntimeError as error:
                raise LoweringError(f"{self._name} could not load or capture the graph: {error}") from error
        self._operands = taken
        return fresh

    def __call__(self, operands: Sequence[torch.Tensor | None], /) -> list[torch.Tensor]:
        """Queues one step.

        Raises:
            LoweringError: the graph is not compiled, an operand is another than it was compiled for, or the GPU refuses the step.
        """
        if self._captured is None:
            raise LoweringError("the graph is not compiled; legal is compile() before the first step")
        for position, captured in zip(sorted(self.reads), self._operands, strict=True):
            if position >= len(operands) or operands[position] is not captured:
                raise LoweringError(f"operand {self._leaf(position)} is not the one that the graph was captured with; legal is that alone")
        try:
            self._captured.replay()
        except RuntimeError as error:
            raise LoweringError(f"{self._name} refused a step: {error}") from error
        return self._outputs

    @functools.cached_property
    def key(self) -> str:
        """What decides the compiled bytes, besides the version that names the directory (`Device.version`): graph and capability."""
        return hashlib.sha256(self._cuda.arch.encode() + b"\0" + self._graph).hexdigest()[:16]

    def _check(self, operands: Sequence[torch.Tensor | None]) -> None:
        if len(operands) != len(self._placeholders):
            raise LoweringError(f"{len(operands)} operands, the graph has {len(self._placeholders)}")
        for position in sorted(self.reads):
            operand, wanted, name = operands[position], self._placeholders[position].meta["val"], self._leaf(position)
            if operand is None:
                raise LoweringError(f"operand {name} is absent, and the graph reads it")
            if (place := self._cuda.place(operand)) != self._name:
                raise LoweringError(f"operand {name} is on {place}; legal is {self._name}")
            if (operand.shape, operand.dtype) != (wanted.shape, wanted.dtype):
                shown = f"{tuple(operand.shape)} {operand.dtype}; the graph takes {tuple(wanted.shape)} {wanted.dtype}"
                raise LoweringError(f"operand {name} is {shown}")
            if not operand.is_contiguous():
                raise LoweringError(f"operand {name} has strides {operand.stride()}; legal is contiguous")

    def _leaf(self, position: int) -> str:
        return str(self._placeholders[position].meta.get("leaf") or f"number {position}")
