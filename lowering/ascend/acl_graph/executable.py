"""Runs an `.aclgraph` file on a device: captured segments are replayed, others launched operator by operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Leaf
from ...device import DerivedValue
from ...device_error import named
from ...switches import CAPTURE, NZ, OVERLAP
from .. import fold
from ..convert import shape_of
from .file import AclFile
from .formats import weight_operands
from .program import AclProgram, GraphSegment
from .updates import Updates

WARM_UPS = 2
"""Launches before a capture, as SGLang and vLLM have them: kernels are loaded and communicators get their links by calls that a capture
refuses (107030)."""

Lists = Mapping[int, list[int]]
"""Integers by the number of the value that a device computed."""


class Captured(Protocol):
    """One captured segment, whose operators, addresses and sizes are those of the capture."""

    def replay(self) -> None:
        """Queues it. Operators with lists wait on the device until `update`."""
        ...

    def update(self, lists: Lists) -> None:
        """Gives the lists of the oldest replay that has none; every replay of a segment with such operators needs one."""
        ...


class AclEngine(Protocol):
    """What runs operators on a device.

    Attributes:
        name: of the device, as `place` says it.
        torch_device: where operators create tensors.
        updates: of the device.
    """

    name: str
    torch_device: torch.device
    updates: Updates

    def find(self, name: str) -> Callable[..., Any]:
        """What runs the operator of that name."""
        ...

    def place(self, tensor: torch.Tensor) -> str:
        """Where a tensor lies."""
        ...

    def check(self, program: AclProgram, operands: Sequence[torch.Tensor | None]) -> None:
        """Refuses what the device would refuse when the program is captured or run first."""
        ...

    def capturing(self) -> AbstractContextManager[None]:
        """While it is entered, operators are queued where segments are captured, behind what was queued before."""
        ...

    def capture(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> Captured:
        """Captures a segment.

        Args:
            values: by number of the node; the segment's own are added, at addresses that replays write again.

        Raises:
            LoweringError: an operator of it cannot be captured.
        """
        ...

    def launch(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> None:
        """Queues the operators of a segment, and adds their values."""
        ...

    def fetch(self, number: int, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """Queues a copy of the integers that a node computed to the host; what it returns waits for them."""
        ...


class AclExecutable:
    """One step of one bucket on a device. Its operands are those of the program, then the derived values (fold.py).

    Lengths that an operator's host code needs are computed by the graph. They are read back behind the segment that computes them, and
    given to the segments behind it while these are queued already: a step may be launched before the one before it has ended. Outputs of
    a captured graph lie at the same addresses in every step; who launches copies them before it launches the next.

    Args:
        acl_file: of all ranks.
        engine: of the device.
        rank: number among all ranks.
        groups: communicator name by symbol.

    Raises:
        LoweringError: an operator is not known here, or communicates over a group that there is none of.
    """

    backend = "aclgraph"

    def __init__(self, acl_file: AclFile, engine: AclEngine, rank: int = 0, groups: Mapping[str, str] | None = None) -> None:
        self.file, self._engine = acl_file, engine
        self._resolved = functools.partial(AclProgram, find=engine.find, rank=rank, groups=groups or {}, device=engine.torch_device)
        self._program = self._resolved(acl_file)
        self._values: list[Any] = []
        self._captured: list[Captured] = []
        self._compiled, self._nz = False, True

    def switch_off(self, switches: Collection[str]) -> None:
        """Does without these (`lowering.switches`)."""
        self._nz = NZ not in switches
        self.file = replace(self.file, captured=self.file.captured and CAPTURE not in switches)
        if OVERLAP in switches and self.file.beside:
            self.file = replace(self.file, beside=())
            self._program = self._resolved(self.file)

    @property
    def reads(self) -> frozenset[int]:
        """Operands that the graph takes."""
        return self._program.reads

    @functools.cached_property
    def nz_operands(self) -> frozenset[int]:
        """Operands that every reader takes as the weight of a matrix product, and whose tiles are filled."""
        return frozenset(weight_operands(self.file, needed=not self._nz))

    def derived(self, params: Sequence[Leaf]) -> tuple[DerivedValue, ...]:
        """Values that are computed from parameters or constants when weights are loaded, see fold.py."""
        return tuple(map(DerivedValue, fold.expressions(self.file, params), fold.sources(self.file)))

    def derive(self, number: int, params: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Computes one of them on the CPU."""
        (value,) = fold.evaluate(self.file, params, (number,))
        return value

    def warm_up(self, operands: Sequence[torch.Tensor | None]) -> None:
        """Launches a graph that is going to be captured, operator by operator.

        Raises:
            LoweringError: as `compile`.
        """
        if self.file.captured:
            self._take(operands)
            with self._engine.capturing():
                for _ in range(WARM_UPS):
                    self._launch()

    def compile(self, operands: Sequence[torch.Tensor | None], cache_dir: Path | None = None) -> bool:
        """Captures the graph over these operands, see `lowering.device.DeviceExecutable`. Captured graphs cannot be stored.

        Raises:
            LoweringError: it is captured already, an operand is not what the graph takes, or an operator cannot be captured.
        """
        self._take(operands)
        if self.file.captured:
            for segment in self._program.segments:
                self._captured.append(self._engine.capture(self._program, segment, self._values))
        self._compiled = True
        return True

    def __call__(self, operands: Sequence[torch.Tensor | None], /) -> list[torch.Tensor]:
        """Queues one step.

        Raises:
            LoweringError: the graph is not compiled, an operand is another than it was compiled for, or an earlier step failed.
        """
        if not self._compiled:
            raise LoweringError("the graph is not compiled; legal is compile() before the first step")
        if moved := [i for i in self.reads if i >= len(operands) or operands[i] is not self._values[i]]:
            names = ", ".join(self._program.leaves[i] or f"number {i}" for i in sorted(moved)[:4])
            raise LoweringError(f"operands {names} are not those that the graph was compiled for; legal is the same memory in every step")
        self._engine.updates.check()
        with named(f"a step on {self._engine.name}"):
            values = self._replay() if self.file.captured else self._launch()
        return [values[i] for i in self._program.results]

    def _replay(self) -> list[Any]:
        known: dict[int, list[int]] = {}
        updates = list[Callable[[], None]]()
        for i, (segment, captured) in enumerate(zip(self._program.segments, self._captured, strict=True)):
            captured.replay()
            if segment.fetched:
                fetched = {number: self._engine.fetch(number, self._values[number]) for number in segment.fetched}
                waiting = [later for later, last in enumerate(self._behind) if last == i]
                updates.append(functools.partial(self._update, known, fetched, waiting))
        # An update is behind its replay, and the lengths of a step on an idle device may be there before its last segment is queued.
        for update in updates:
            self._engine.updates.put(update)
        return self._values

    @functools.cached_property
    def _behind(self) -> list[int]:
        """For each segment the last one behind which its lists are read; -1 where it takes none."""
        segments = self._program.segments
        return [max((i for i, other in enumerate(segments) if set(other.fetched) & set(each.lists)), default=-1) for each in segments]

    def _update(self, known: dict[int, list[int]], fetched: Mapping[int, Callable[[], list[int]]], waiting: Sequence[int]) -> None:
        known |= {number: read() for number, read in fetched.items()}
        for i in waiting:
            self._captured[i].update({number: known[number] for number in self._program.segments[i].lists})

    def _launch(self) -> list[Any]:
        values = list(self._values)
        for segment in self._program.segments:
            self._engine.launch(self._program, segment, values)
            for number, read in [(number, self._engine.fetch(number, values[number])) for number in segment.fetched]:
                values[number] = read()
        return values

    def _take(self, operands: Sequence[torch.Tensor | None]) -> None:
        if self._compiled:
            raise LoweringError("the graph is compiled already; legal is once")
        self._check(operands)
        self._engine.check(self._program, operands)
        self._values = [*operands, *[None] * (len(self._program.nodes) - len(operands))]

    def _check(self, operands: Sequence[torch.Tensor | None]) -> None:
        if len(operands) != self.file.operands:
            derived = self.file.operands - self.file.inputs
            raise LoweringError(f"{len(operands)} operands, the graph has {self.file.inputs} and {derived} derived values")
        for i in sorted(self.reads):
            operand, name, wanted = operands[i], self._program.leaves[i] or f"number {i}", shape_of(self._program.vals[i])
            if operand is None:
                raise LoweringError(f"operand {name} is absent, and the graph reads it")
            if (place := self._engine.place(operand)) != self._engine.name:
                raise LoweringError(f"operand {name} is on {place}; legal is {self._engine.name}")
            if shape_of(operand) != wanted:
                raise LoweringError(f"operand {name} is {shape_of(operand)}; the graph takes {wanted}")
            if not operand.is_contiguous():
                raise LoweringError(f"operand {name} has strides {operand.stride()}; legal is contiguous")
