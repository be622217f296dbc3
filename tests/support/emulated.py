"""Ranks of emulated devices as threads of this process, each with gloo groups of its own."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo

from npucompile.graphs.types import DISPATCH, Mesh
from npucompile.lowering.ascend.acl_graph.file import AclFile
from npucompile.lowering.ascend.acl_graph.file import encode as acl_encode
from npucompile.lowering.ascend.emulator.device import EmulatedDevice, open_device
from npucompile.lowering.ascend.emulator.emulated_graph import DONATIONS
from npucompile.lowering.ascend.emulator.ge_program import parsed_shape
from npucompile.lowering.ascend.fold import evaluate
from npucompile.lowering.ascend.ge_file import GeFile, encode, messages

from . import ge_calls as gc

WAIT_S = 30.0
"""Longer than anything here takes."""


class DeviceGraph(gc.Hand):
    """A ModelDef under construction, with all that a device needs to know of operands and outputs."""

    def operand(self, index: int, meta: str, name: str = "") -> str:
        """A `Data` operator; returns its tensor."""
        tensor = self.op("Data", {}, name or f"x{index}", [meta], index=index)
        dtype, sizes = parsed_shape(meta) or (None, ())
        for desc in (self.model.graph[0].op[-1].output_desc[0], self.model.graph[0].op[-1].input_desc.add(name="x")):
            desc.dtype = messages().DataType.Value(gc.GE_DTYPES[dtype][0])
            desc.shape.dim.extend(sizes)
        return tensor

    def file(self, *results: str, inputs: int = 1, donations: Any = (), bound: Any = (), patches: Any = (), **engine: str) -> GeFile:
        """The GE file; `donations` are (output, operand), and outputs without one come first."""
        self.model.graph[0].attr["_output_dtypes"].list.i.extend([0] * len(results))
        graph = self.model_with(*results).SerializeToString()
        options = {DONATIONS: "|".join(f"{operand},{output}" for output, operand in donations)}
        return GeFile(graph, options, tuple(donations), tuple(bound), inputs, len(results) - len(donations), tuple(patches), None, engine)


def opened(
    device: EmulatedDevice, ge_file: GeFile | AclFile, path: Any, rank: int = 0, communicators: Mapping[str, str] | None = None
) -> Any:
    """A file as the device's executable; `path` is a directory to write it to."""
    captured = isinstance(ge_file, AclFile)
    where = path / f"rank{rank}-{time.monotonic_ns()}.{'aclgraph' if captured else 'ge'}"
    where.write_bytes(acl_encode(ge_file) if isinstance(ge_file, AclFile) else encode(ge_file))
    return device.open(where, rank, communicators or {})


def on_device(device: EmulatedDevice, value: torch.Tensor) -> torch.Tensor:
    """A copy of a host tensor in the device's memory."""
    return device.empty(value.shape, value.dtype).copy_(value)


def gloo(name: str, ranks: tuple[int, ...], rank: int, store: Any, timeout_s: float) -> Any:
    """A gloo process group of one rank, which waits for the others."""
    prefixed = PrefixStore(f"{name}/{ranks[0]}", store)
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    backend = ProcessGroupGloo(prefixed, ranks.index(rank), len(ranks), options)
    group = ProcessGroup(prefixed, ranks.index(rank), len(ranks))
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


class Machine:
    """A file on emulated devices, one a rank: a machine of `fleets.Fleet`, whose host tensors are copied there and back each step.

    Args:
        path: a directory.
        ge_file: of all ranks.
    """

    def __init__(self, path: Path, ge_file: GeFile | AclFile, mesh: Mesh) -> None:
        self.path, self.ge_file = path, ge_file
        self.operands: list[list[torch.Tensor]] = []
        self.devices = [open_device(rank) for rank in range(mesh.size)]
        names = on_ranks(mesh, lambda rank, groups: self.devices[rank].communicators(groups, rank))
        self.executables = [opened(self.devices[rank], ge_file, path, rank, own) for rank, own in enumerate(names)]

    def __call__(self, operands_per_rank: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        operands_per_rank = [[*operands, *evaluate(self.ge_file, operands)] for operands in operands_per_rank]
        if not self.operands:
            ranks = zip(self.devices, operands_per_rank, strict=True)
            self.operands = [[device.empty(x.shape, x.dtype) for x in operands] for device, operands in ranks]
        self._fill(operands_per_rank)
        if not self.executables[0]._compiled:
            with ThreadPoolExecutor(len(self.executables)) as threads:
                # A rank waits for the others.
                list(threads.map(lambda executable, there: executable.warm_up(there), self.executables, self.operands))
            for executable, there in zip(self.executables, self.operands, strict=True):
                executable.compile(there)
            self._fill(operands_per_rank)
        results = [executable(there) for executable, there in zip(self.executables, self.operands, strict=True)]
        for device in self.devices:
            device.record().wait(WAIT_S)
        for there, operands in zip(self.operands, operands_per_rank, strict=True):
            for i in _written(self.ge_file):
                operands[i].copy_(there[i])
        return [[result.cpu() for result in own] for own in results]

    def _fill(self, operands_per_rank: Sequence[Sequence[torch.Tensor]]) -> None:
        for there, operands in zip(self.operands, operands_per_rank, strict=True):
            for target, source in zip(there, operands, strict=True):
                target.copy_(source)

    def close(self) -> None:
        for device in self.devices:
            device.close()


def _written(file: GeFile | AclFile) -> set[int]:
    return {*file.written} if isinstance(file, AclFile) else {*file.bound, *(operand for _, operand in file.donations)}


def on_devices(mesh: Mesh, work: Callable[[EmulatedDevice, int, Mapping[str, str]], Any], timeout_s: float = WAIT_S) -> list[Any]:
    """Runs `work(device, rank, communicators)` for every rank on a thread and a device of its own."""

    def run(rank: int, groups: Mapping[str, Any]) -> Any:
        device = open_device(rank)
        try:
            return work(device, rank, device.communicators(groups, rank))
        finally:
            device.close()

    return on_ranks(mesh, run, timeout_s)


def on_ranks(mesh: Mesh, work: Callable[[int, Mapping[str, Any]], Any], timeout_s: float = 60) -> list[Any]:
    """Runs `work(rank, groups by name)` for every rank on a thread of its own; returns what each returned or raised."""
    store, answers = HashStore(), [None] * mesh.size

    def run(rank: int) -> None:
        try:
            groups = {name: gloo(name, mesh.group(name, rank), rank, store, timeout_s) for name in (*mesh.groups(), DISPATCH)}
            answers[rank] = work(rank, groups)
        except Exception as error:  # handed to the test, which looks at it
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
