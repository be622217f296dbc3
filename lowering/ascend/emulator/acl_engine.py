"""Runs graphs of torch operators on an emulated device, on its stream: captured or not, with the CPU kernels of NPU operators."""

from __future__ import annotations

import functools
import hashlib
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ....graphs.errors import LoweringError
from ...artifact import graph_io
from ..acl_graph.program import AclProgram, Segment, run
from ..convert import shape_of
from ..operators.table import GROUP_ARGUMENTS, GROUP_KERNELS, KERNELS
from .acl_checks import check_communication, check_formats, check_segment
from .emulated_graph import DeviceState
from .memory import DeviceTensor, allocate

POLL_S = 0.05
_WAIT = "_c10d_functional.wait_tensor.default"


class EmulatedAclEngine:
    """The engine of one executable on an emulated device, see `acl_graph.executable.AclEngine`.

    Args:
        state: of the device.
        groups: name of the communicator by symbol.
        fingerprint: of the file, which the members of a communicator compare.
    """

    torch_device = torch.device("cpu")

    def __init__(self, state: DeviceState, groups: Mapping[str, str], graph: bytes, name: str) -> None:
        self.name, self.updates, self._state, self._groups = state.name, state.updates, state, groups
        self._fingerprint = hashlib.blake2b(graph, digest_size=16).digest()
        self._graph_name, self._held = name, list[Any]()
        self._current: str | None = None
        self._pinned: dict[int, torch.Tensor] = {}
        self._steps = 0

    def find(self, name: str) -> Callable[..., Any]:
        """The CPU kernel of an operator.

        Raises:
            LoweringError: it has none.
        """
        if name in GROUP_KERNELS:
            return functools.partial(self._exchange, name)
        if name in KERNELS:
            return KERNELS[name]
        if name == _WAIT:
            return lambda value: value
        if name.startswith(("aten.", "operator.")):
            return graph_io.find_target(name)
        raise LoweringError(f"{name} has no CPU kernel; besides aten there are {', '.join(sorted([*KERNELS, *GROUP_KERNELS]))}")

    def place(self, tensor: torch.Tensor) -> str:
        """The device whose memory a tensor lies in."""
        return tensor.allocation.stream.name if isinstance(tensor, DeviceTensor) else tensor.device.type

    def check(self, program: AclProgram, operands: Sequence[torch.Tensor | None]) -> None:
        """Refuses formats and communicators that the device does not take."""
        check_formats(program, operands)
        check_communication(program, self._state, self._groups, self._graph_name)

    def capture(self, program: AclProgram, segment: Segment, values: list[Any]) -> EmulatedSegment:
        """Captures a segment: its results lie at the same addresses in every replay."""
        check_segment(program, segment, self._state, self._groups)
        self._allocate(program, segment, values)
        return EmulatedSegment(self, program, segment, values)

    def launch(self, program: AclProgram, segment: Segment, values: list[Any]) -> None:
        """Queues a segment with new results; the lists that it takes are in `values`."""
        lists = {number: values[number] for number in segment.lists}
        self._allocate(program, segment, values)
        self.queue(program, segment, list(values), lambda: lists)

    def fetch(self, number: int, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """Queues a copy into page-locked memory."""
        if number not in self._pinned:
            self._pinned[number] = self._state.pinned.allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        host = self._pinned[number]
        host.copy_(tensor, non_blocking=True)
        event = self._state.stream.record()

        def read() -> list[int]:
            event.wait()
            return [int(value) for value in host.tolist()]

        return read

    def queue(self, program: AclProgram, segment: Segment, values: list[Any], lists: Callable[[], Mapping[int, list[int]]]) -> None:
        """Queues the operators of a segment.

        Args:
            values: what the host holds: operands, and memory for what it reads.
            lists: waits, on the stream, for the lists that operators of the segment take.
        """
        if first := segment is program.segments[0]:
            self._steps += 1
        what = f"step {self._steps} of {self._graph_name}"
        self._state.stream.launch(what, lambda: self._run(program, segment, values, lists, first))

    def _allocate(self, program: AclProgram, segment: Segment, values: list[Any]) -> None:
        here = {call.number for call in segment.calls}
        for number in {*segment.fetched, *program.results} & here:
            val = program.vals[number]
            values[number] = allocate(self._state.stream, self._state.pinned, val.shape, val.dtype)

    def _run(
        self, program: AclProgram, segment: Segment, values: list[Any], lists: Callable[[], Mapping[int, list[int]]], first: bool
    ) -> None:
        """Runs a segment, on the stream. Values between segments are kept here; the host knows only those that it reads."""
        self._state.stream.describe(self._progress)
        if first:
            self._held = [self._operand(program, i, values[i]) for i in range(program.file.operands)]
            self._held += [None] * (len(program.nodes) - len(self._held))
        given = False
        with torch.no_grad():
            for call in segment.calls:
                self._current = f"{program.nodes[call.number].name} ({call.name})"
                if call.takes_lists and not given:
                    for number, integers in lists().items():
                        self._held[number] = integers
                    given = True
                try:
                    run((call,), self._held)
                # An index out of range ends a device's step as well; which operator it was is known here alone.
                except Exception as error:
                    kind = "" if isinstance(error, LoweringError) else f"{type(error).__name__}: "
                    raise LoweringError(f"operator {self._current}: {kind}{error}") from error
                if isinstance(values[call.number], DeviceTensor):
                    _write(values[call.number], self._held[call.number], self._current)

    def _operand(self, program: AclProgram, number: int, tensor: DeviceTensor | None) -> torch.Tensor | None:
        if tensor is None or number not in program.reads:
            return None
        if (gap := tensor.unwritten()) is not None:
            name = program.leaves[number] or f"number {number}"
            raise LoweringError(f"operand {name}: nothing was written to its bytes {gap[0]} to {gap[1] - 1}; legal is all of them")
        return tensor.held

    def _exchange(self, name: str, *args: Any, **kwargs: Any) -> Any:
        position, argument = GROUP_ARGUMENTS[name]
        group = args[position] if len(args) > position else kwargs[argument]
        communicator = self._state.communicators[self._groups.get(group, group)]
        inputs: list[torch.Tensor] = []
        map_aggregate((args, kwargs), lambda value: inputs.append(value) if isinstance(value, torch.Tensor) else None)
        received = communicator.exchange(self._current or name, inputs, self._fingerprint)
        members = [_with_tensors(args, kwargs, theirs) for theirs in received]
        rule: Any = GROUP_KERNELS[name]
        return rule(members, [communicator.index])[0]

    def _progress(self) -> str:
        waiting = [state for communicator in self._state.communicators.values() if (state := communicator.waiting()) is not None]
        return "; ".join([f"operator {self._current}", *waiting])


class EmulatedSegment:
    """A captured segment, see `acl_graph.executable.Captured`.

    Args:
        values: operands and results, whose memory every replay reads and writes.
    """

    def __init__(self, engine: EmulatedAclEngine, program: AclProgram, segment: Segment, values: list[Any]) -> None:
        self._engine, self._program, self._segment, self._values = engine, program, segment, list(values)
        self._addresses = [tensor.data_ptr() if isinstance(tensor, DeviceTensor) else None for tensor in self._values]
        self._lists: queue.SimpleQueue[Mapping[int, list[int]]] = queue.SimpleQueue()
        self._replays = self._updates = self._finished = 0

    def replay(self) -> None:
        """Queues it."""
        self._replays += 1
        self._engine.queue(self._program, self._segment, self._values, self._wait)
        self._engine._state.stream.launch(f"the end of replay {self._replays}", self._end)

    def update(self, lists: Mapping[int, list[int]]) -> None:
        """Gives the lists of a replay.

        Raises:
            LoweringError: no replay waits for any, an earlier one still runs with the lists it has, or some are missing.
        """
        if self._updates >= self._replays:
            raise LoweringError(
                f"a segment is updated {self._updates + 1} times for {self._replays} replays; legal is once behind each replay"
            )
        if self._finished < self._updates:
            raise LoweringError("a segment is updated while an earlier replay of it runs; legal is behind its end")
        if missing := sorted(set(self._segment.lists) - set(lists)):
            raise LoweringError(f"a segment is updated without the lists of nodes {missing}; legal are all of them")
        self._updates += 1
        self._lists.put(lists)

    def _wait(self) -> Mapping[int, list[int]]:
        """Waits, on the stream, as a captured graph waits for the event of an update."""
        while True:
            try:
                return self._lists.get(timeout=POLL_S)
            except queue.Empty:
                self._engine.updates.check()

    def _end(self) -> None:
        self._finished += 1


def _write(memory: DeviceTensor, value: torch.Tensor, where: str) -> None:
    if (value.dtype, value.shape) != (memory.dtype, memory.shape):
        raise LoweringError(f"{where} gives {shape_of(value)}; the graph says {shape_of(memory)}")
    memory.held.copy_(value)
    memory.mark_written()


def _with_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A member's arguments: these with its tensors in place of this member's, in order."""
    theirs = iter(tensors)

    def value(mine: Any) -> Any:
        return next(theirs) if isinstance(mine, torch.Tensor) else mine

    return tuple(map_aggregate(args, value)), dict(map_aggregate(kwargs, value))
