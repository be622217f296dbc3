"""A device that computes something wrong: an emulated one whose executables are changed on their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.ascend.emulator.device import open_device
from npucompile.lowering.ascend.emulator.ge_program import BORDER
from npucompile.lowering.ascend.ge_file import GeFile, parse
from npucompile.tools.builder import driver, pool

Operands = Sequence[torch.Tensor]
Run = Callable[["FaultyExecutable", Operands], list[torch.Tensor]]


def npu_artifact(
    root: Path, monkeypatch: Any, mesh: str = "1", options: Mapping[str, Any] = MappingProxyType({}), **sizes: Any
) -> Artifact:
    """A small model of four layers for NPUs, with its random weights: decode batches 2 and 4, one draft, prefill 4, but for `options`."""
    checkpoint = tiny.write_checkpoint(root / "checkpoint", **{**tiny.NPU_SIZES, **sizes})
    monkeypatch.setattr(pool, "run", tiny.compile_once)
    driver.build(tiny.planned_device(checkpoint, mesh=mesh, **options), root / "out", root / "cache", tiny.QUIET, jobs=1)
    return Artifact.open(root / "out")


class FaultyExecutable:
    """An executable that may refuse, and may change what it computed.

    Attributes:
        types: of the operators of its graph, in order.
        previous: the executable of the device that ran before this one.
    """

    def __init__(self, device: FaultyDevice, real: Any) -> None:
        self.device, self.real, self.ge_file = device, real, real.ge_file
        self.types = operators(real.ge_file)
        self.previous: FaultyExecutable | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def compile(self, operands: Any, cache_dir: Path | None = None) -> bool:
        self.device.on_compile(self)
        return bool(self.real.compile(operands, cache_dir))

    def __call__(self, operands: Operands) -> list[torch.Tensor]:
        results = self.device.on_run(self, operands)
        self.device.last = self
        return results


class FaultyDevice:
    """An emulated device with faults.

    Args:
        on_run: runs an executable, `executable.real`, and changes what it leaves.
        on_compile: may raise.
    """

    def __init__(self, on_run: Run, on_compile: Callable[[FaultyExecutable], None] = lambda _: None, index: int = 0) -> None:
        self.real, self.on_run, self.on_compile = open_device(index), on_run, on_compile
        self.last: FaultyExecutable | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def open(self, path: Path, rank: int, communicators: Any) -> FaultyExecutable:
        return FaultyExecutable(self, self.real.open(path, rank, communicators))


def operators(ge_file: GeFile) -> list[str]:
    """Types of the operators of a graph that compute."""
    return [op.type for op in parse(ge_file.graph).graph[0].op if op.type not in BORDER]


def right(executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
    """No fault."""
    results: list[torch.Tensor] = executable.real(operands)
    return results


def wrong_results(of: Callable[[FaultyExecutable], bool]) -> Run:
    """The first result of some graphs is all zeros."""

    def run(executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
        results = right(executable, operands)
        if of(executable) and results:
            results[0].zero_()
        return results

    return run


def lost_writes(of: Callable[[FaultyExecutable], bool]) -> Run:
    """The first operand that some graphs write floats to is all zeros afterwards."""

    def run(executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
        results = right(executable, operands)
        written = sorted({*executable.ge_file.bound, *(operand for _, operand in executable.ge_file.donations)})
        floats = [operands[i] for i in written if operands[i].dtype.is_floating_point]
        if of(executable) and floats:
            floats[0].zero_()
        return results

    return run
