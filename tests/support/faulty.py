"""A device that computes something wrong: an emulated one whose executables are changed on their way.

Processes that have one import this file, which therefore imports no more than the device.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.device import open_device
from npucompile.lowering.ascend.emulator.fault import Fault
from npucompile.lowering.ascend.emulator.ge_program import BORDER
from npucompile.lowering.ascend.emulator.memory import NZ
from npucompile.lowering.ascend.ge_file import GeFile, parse
from npucompile.tools.prove.bringup.device_graph import Host
from npucompile.tools.prove.bringup.results import Judgement, Timing

Operands = Sequence[torch.Tensor]
Run = Callable[["FaultyExecutable", Operands], list[torch.Tensor]]


class FaultyExecutable:
    """An executable that may refuse, and may change what it computed.

    Attributes:
        types: of the operators of its graph, in order.
        previous: the executable of the device that ran before this one.
    """

    def __init__(self, device: FaultyDevice, real: Any) -> None:
        self.device, self.real, self.ge_file = device, real, getattr(real, "ge_file", None)
        self.types = operators(real.ge_file) if self.ge_file else []
        self.previous: FaultyExecutable | None = None
        self.path = Path()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def compile(self, operands: Any, cache_dir: Path | None = None) -> bool:
        self.device.on_compile(self)
        return bool(self.real.compile(operands, cache_dir))

    def __call__(self, operands: Operands) -> list[torch.Tensor]:
        results = self.device.on_run(self, operands)
        self.device.last = self
        self.device.runs += 1
        return results


class FaultyDevice:
    """An emulated device with faults.

    Args:
        on_run: runs an executable, `executable.real`, and changes what it leaves.
        on_compile: may raise.
    """

    def __init__(
        self, on_run: Run, on_compile: Callable[[FaultyExecutable], None] = lambda _: None, index: int = 0, real: Any = None
    ) -> None:
        self.real, self.on_run, self.on_compile = real or open_device(index), on_run, on_compile
        self.last: FaultyExecutable | None = None
        self.opened: set[Path] = set()
        self.runs = self.read = 0

    def record(self) -> Any:
        return FaultyEvent(self, self.real.record(), self.runs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def open(self, path: Path, rank: int, communicators: Any) -> FaultyExecutable:
        executable = FaultyExecutable(self, self.real.open(path, rank, communicators))
        executable.path = path
        self.opened.add(path)
        return executable


@dataclass
class FaultyEvent:
    """An event that says how many runs have been waited for."""

    device: FaultyDevice
    real: Any
    runs: int

    def wait(self, timeout_s: float | None = None) -> None:
        self.real.wait(timeout_s)
        self.device.read = max(self.device.read, self.runs)


def operators(ge_file: GeFile) -> list[str]:
    """Types of the operators of a graph that compute."""
    return [op.type for op in parse(ge_file.graph).graph[0].op if op.type not in BORDER]


def right(executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
    """No fault."""
    results: list[torch.Tensor] = executable.real(operands)
    return results


def wrong_results(of: Callable[[FaultyExecutable], bool]) -> Run:
    """The first result of some graphs is all zeros."""
    return functools.partial(_wrong_results, of)


def _wrong_results(of: Callable[[FaultyExecutable], bool], executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
    results = right(executable, operands)
    if of(executable) and results:
        results[0].zero_()
    return results


def lost_writes(of: Callable[[FaultyExecutable], bool]) -> Run:
    """The first operand that some graphs write floats to is all zeros afterwards."""
    return functools.partial(_lost_writes, of)


def _lost_writes(of: Callable[[FaultyExecutable], bool], executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
    results = right(executable, operands)
    written = sorted({*executable.ge_file.bound, *(operand for _, operand in executable.ge_file.donations)})
    floats = [operands[i] for i in written if operands[i].dtype.is_floating_point]
    if of(executable) and floats:
        floats[0].zero_()
    return results


def wrong_where(condition: Callable[[FaultyExecutable, Operands], bool], executable: FaultyExecutable, operands: Operands) -> Any:
    """The tokens of decode steps are wrong where a condition holds."""
    if not is_decode(executable) or not condition(executable, operands):
        return right(executable, operands)
    results = right(executable, operands)
    results[0].zero_()
    return results


def is_decode(executable: FaultyExecutable) -> bool:
    """Whether it is a decode bucket, of GE or captured; prefill of linear attention is made of products."""
    captured = getattr(executable.real, "file", None)
    return b"npu_recurrent_gated_delta_rule" in captured.graph if captured else "RecurrentGatedDeltaRule" in executable.types


def ends_in(file: str) -> Run:
    """The graph of this file ends the process."""
    return functools.partial(_ends_in, file)


def _ends_in(file: str, executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
    return os.abort() if executable.path.name == file else right(executable, operands)


def in_nz(executable: FaultyExecutable, operands: Operands) -> bool:
    return any(operands[i].allocation.format == NZ for i in executable.real.reads)


def in_aiv(executable: FaultyExecutable, operands: Operands) -> bool:
    return os.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV"


def ahead(executable: FaultyExecutable, operands: Operands) -> bool:
    return executable.device.read < executable.device.runs


def beside_others(executable: FaultyExecutable, operands: Operands) -> bool:
    return len(executable.device.opened) > 2


def is_captured(executable: FaultyExecutable, operands: Operands) -> bool:
    return bool(executable.real.file.captured)


def compiled_online(executable: FaultyExecutable, operands: Operands) -> bool:
    return executable.real.ge_file.options.get("ge.jit_compile", "2") == "2"


def always(executable: FaultyExecutable, operands: Operands) -> bool:
    return True


def is_whole(executable: FaultyExecutable) -> bool:
    return len(executable.types) > 500


def is_layer(executable: FaultyExecutable) -> bool:
    return 20 < len(executable.types) < 500


def is_alone(kind: str) -> Callable[[FaultyExecutable], bool]:
    return functools.partial(_is_alone, kind)


def _is_alone(kind: str, executable: FaultyExecutable) -> bool:
    return executable.types == [kind]


def loses_a_pool_between_decode_buckets(executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
    """The wrong thing happens only where one decode bucket runs straight after the other."""
    last, decodes = executable.device.last, ("RecurrentGatedDeltaRule" in executable.types and is_whole(executable))
    if decodes and last is not None and last is not executable and "RecurrentGatedDeltaRule" in last.types and is_whole(last):
        for operand in executable.ge_file.bound:
            operands[operand].zero_()
    return right(executable, operands)


# --- devices of other processes, which get what opens them pickled ---


@dataclass(frozen=True)
class Ends:
    """A case that ends its process, or does nothing."""

    name: str
    how: Callable[[], object] = int
    assumption = "kernels"

    def judge(self, host: Host) -> Judgement:
        self.how()
        return Judgement(timings=[Timing(self.name, "", 1.0)])


def hangs() -> None:
    threading.Event().wait()


def exits() -> None:
    os.write(2, b"EZ9999: an inner error")
    os._exit(3)


def wrong_on_the_second(executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
    """All-gathers alone are wrong, on the second of two ranks."""
    results = right(executable, operands)
    if executable.types == ["HcomAllGather"] and executable.device.name == "emulated:1":
        results[0].zero_()
    return results


def refuses_on_all_ranks(kind: str, index: int = 0) -> FaultyDevice:
    """Opens a device whose compiler refuses whole buckets."""

    def refuse(executable: FaultyExecutable) -> None:
        if is_whole(executable):
            raise LoweringError("no tiling")

    return FaultyDevice(right, refuse, index)


def refuses_to_open(kind: str, index: int = 0) -> FaultyDevice:
    raise LoweringError("the device is not there")


@dataclass(frozen=True)
class Opens:
    """Opens devices with a fault."""

    on_run: Run

    def __call__(self, kind: str, index: int = 0) -> FaultyDevice:
        return FaultyDevice(self.on_run, index=index)


@dataclass(frozen=True)
class OpensOnce:
    """Opens emulated devices that log their steps; each has a fault or none, by how many were opened before it.

    Args:
        directory: of the log, where the devices of all processes are counted.
        faults: by the number of the device.
    """

    directory: Path
    faults: Mapping[int, Fault] = field(default_factory=dict)

    def __call__(self, kind: str, index: int = 0) -> FaultyDevice:
        number = len(list(self.directory.glob("opened-*")))
        (self.directory / f"opened-{number}").touch()
        opened = FaultyDevice(functools.partial(self._logged, number), index=index)
        opened.real._state.fault = self.faults.get(number)
        return opened

    def _logged(self, number: int, executable: FaultyExecutable, operands: Operands) -> list[torch.Tensor]:
        ops = parse(executable.ge_file.graph).graph[0].op if executable.ge_file else []
        names = [op.name for op in ops if op.type not in BORDER]
        with (self.directory / "steps").open("a") as log:
            log.write(json.dumps({"device": number, "file": executable.path.name, "names": names[-40:]}) + "\n")
        return right(executable, operands)

    def steps(self) -> list[dict[str, Any]]:
        """Steps of all devices, in order."""
        return [json.loads(line) for line in (self.directory / "steps").read_text().splitlines()]


CHILDREN = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
"""Environment of processes that find the tests."""
