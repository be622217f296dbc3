"""A GPU without one: a stream with events, CUDA graphs and a compiler behind the protocol that a real one is used by.

Memory and stream are those of the emulated device: the host sees nothing of a copy or a step before an event behind it has come, memory
that was never written is not read, and copies that do not block want pinned memory. Arithmetic is that of the file's own graph, on CPU
tensors. What a GPU does to those who rely on more is done here, too: outputs of all graphs share memory, so that a replay destroys those
of the others; and what a graph captured is what it runs over, wherever operands are later.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch.fx import GraphModule

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.memory import DeviceTensor, PinnedMemory, allocate
from npucompile.lowering.ascend.emulator.stream import Stream, StreamEvent
from npucompile.lowering.backends.eager import EagerExecutable
from npucompile.lowering.cuda import compiler
from npucompile.lowering.cuda.torch_cuda import WARM_UPS


class FakeEvent:
    """An event as torch.cuda has it: failures are RuntimeErrors."""

    def __init__(self, event: StreamEvent) -> None:
        self._event = event

    def query(self) -> bool:
        if not self._event.passed():
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        try:
            self._event.wait()
        except LoweringError as error:
            raise RuntimeError(str(error)) from error


class FakeRun:
    """A loaded package."""

    def __init__(self, cuda: FakeCuda, graph: GraphModule) -> None:
        self.cuda = cuda
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                assert torch.device(node.kwargs["device"]).type == "cuda", f"{node} computes on {node.kwargs['device']}"
                node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        self.outputs = [(node.meta["val"].shape, node.meta["val"].dtype) for node in output.args[0]]
        self._run = EagerExecutable(graph)

    def allocate(self) -> list[torch.Tensor]:
        return [self.cuda.empty(shape, dtype) for shape, dtype in self.outputs]

    def queue(self, what: str, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        def job() -> None:
            for operand in operands:
                if (gap := operand.unwritten()) is not None:
                    raise LoweringError(f"it reads bytes {gap} of {operand!r}, which nothing was written to")
            for output, result in zip(outputs, self._run([operand.held for operand in operands]), strict=True):
                output.held.copy_(result)
                output.mark_written()

        self.cuda.stream.launch(what, job)

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = self.allocate()
        self.queue("a warm-up", operands, outputs)
        self.cuda.log.append("run")
        return outputs


class FakeGraph:
    """A captured graph."""

    def __init__(self, run: FakeRun, operands: Sequence[torch.Tensor]) -> None:
        self._run, self._operands, self.outputs = run, list(operands), run.allocate()

    def replay(self) -> None:
        cuda = self._run.cuda
        if cuda.refuses:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        cuda.log.append("replay")
        cuda.stream.launch("memory of other graphs", lambda: self._destroy([graph for graph in cuda.graphs if graph is not self]))
        self._run.queue("a step", self._operands, self.outputs)

    @staticmethod
    def _destroy(others: Sequence[FakeGraph]) -> None:
        for output in (output for other in others for output in other.outputs):
            output.held.view(-1).view(torch.uint8).fill_(0x5A)


class FakeCuda:
    """See `lowering.cuda.torch_cuda.Cuda`.

    Attributes:
        log: what was done, in order.
        refuses: whether replays fail.
    """

    def __init__(self, arch: str = "90") -> None:
        self.arch, self.chip, self.version = arch, "Fake GPU", f"cuda-13.0-torch-{torch.__version__}-Fake GPU {arch}"
        self.stream, self._pinned = Stream("cuda:0"), PinnedMemory()
        self.log: list[str] = []
        self.graphs: list[FakeGraph] = []
        self.entered: set[int] = set()
        self.refuses = False

    def enter(self) -> None:
        self.entered.add(threading.get_ident())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> DeviceTensor:
        return allocate(self.stream, self._pinned, shape, dtype)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self._pinned.allocate(nbytes)

    def place(self, tensor: torch.Tensor) -> str:
        return tensor.allocation.stream.name if isinstance(tensor, DeviceTensor) else tensor.device.type

    def record(self) -> FakeEvent:
        assert threading.get_ident() in self.entered, "this thread has no current device"
        self.log.append("record")
        return FakeEvent(self.stream.record())

    def compile(self, graph: bytes, reads: Sequence[int], name: str, directory: Path) -> Path:
        self.log.append("compile")
        package = directory / f"{name}.building.pt2"
        package.write_bytes(msgpack.packb([graph, list(reads)]))
        return package

    def load(self, package: Path) -> FakeRun:
        graph, reads = msgpack.unpackb(package.read_bytes())
        return FakeRun(self, compiler.graph_of_reads(graph, reads))

    def capture(self, run: FakeRun, operands: Sequence[torch.Tensor]) -> tuple[FakeGraph, list[Any]]:
        for _ in range(WARM_UPS):
            run(operands)
        self.stream.record().wait()
        self.log.append("capture")
        self.graphs.append(FakeGraph(run, operands))
        return self.graphs[-1], self.graphs[-1].outputs

    def close(self) -> None:
        self.stream.close()
