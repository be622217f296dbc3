"""Runs graphs of torch operators on an emulated device, on its stream: captured or not, with the CPU kernels of NPU operators."""

from __future__ import annotations

import contextlib
import hashlib
import queue
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ...artifact import graph_io
from ..acl_graph.program import AclProgram, GraphSegment, TorchCall, Value
from ..operators.table import GROUP_ARGUMENTS, group_of
from .checks import check_captured_formats, check_communication, check_segment
from .device_state import DeviceState
from .memory import DeviceTensor, allocate
from .program import EmulatedProgram
from .torch_program import TorchStep, collected, kernel_of

POLL_S = 0.05


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
        self._running, self._steps = EmulatedProgram(), dict[int, TorchStep]()
        self._pinned: dict[int, torch.Tensor] = {}
        self._count = 0

    def find(self, name: str) -> Callable[..., Any]:
        """The CPU kernel of an operator.

        Raises:
            LoweringError: it has none.
        """
        return kernel_of(graph_io.NamedOperator(name))

    def place(self, tensor: torch.Tensor) -> str:
        """The device whose memory a tensor lies in."""
        return tensor.allocation.stream.name if isinstance(tensor, DeviceTensor) else tensor.device.type

    def check(self, program: AclProgram, operands: Sequence[torch.Tensor | None]) -> None:
        """Refuses formats and communicators that the device does not take."""
        for call in (call for segment in program.segments for call in segment.calls):
            group = group_of(call.name, call.args, call.kwargs) if call.name in GROUP_ARGUMENTS else ""
            arguments, group = (call.args, call.kwargs), self._groups.get(group, group)
            self._steps[call.number] = TorchStep(program.nodes[call.number], call.number, call.target, arguments, group)
            self._steps[call.number].dead = call.frees
        # The host lets go behind the last call of a segment what another stream may read until it ends.
        for last in (call for segment in program.segments for call in segment.calls[-1:]):
            self._steps[last.number].dead = ()
        check_captured_formats(program, operands)
        check_communication(self._steps.values(), self._state, self._graph_name)

    def capturing(self) -> AbstractContextManager[None]:
        """There is one stream."""
        return contextlib.nullcontext()

    def capture(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> EmulatedSegment:
        """Captures a segment: its results lie at the same addresses in every replay.

        Raises:
            LoweringError: as `check_segment`; or it communicates and was never launched, so that links would be made in the capture.
        """
        groups = {self._steps[call.number].group for call in segment.calls} - {""}
        check_segment(program, segment, self._state, groups)
        if groups and not self._count:
            raise LoweringError(
                f"{self._graph_name} is captured before links over {', '.join(sorted(groups))} are made; legal is `warm_up`"
            )
        self._allocate(program, segment, values)
        return EmulatedSegment(self, program, segment, values)

    def launch(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> None:
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

    def queue(self, program: AclProgram, segment: GraphSegment, values: list[Any], lists: Callable[[], Mapping[int, list[int]]]) -> None:
        """Queues the operators of a segment.

        Args:
            values: what the host holds: operands, and memory for what it reads.
            lists: waits, on the stream, for the lists that operators of the segment take.
        """
        if first := segment is program.segments[0]:
            if not self._count:
                self._state.check_first_run(self._graph_name)
            self._count += 1
            self._state.count_step()
        what = f"step {self._count} of {self._graph_name}"
        self._state.stream.launch(what, lambda: self._run(program, segment, values, lists, first))

    def _allocate(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> None:
        here = {call.number for call in segment.calls}
        for number in {*segment.fetched, *program.results} & here:
            val = program.vals[number]
            values[number] = allocate(self._state.stream, self._state.pinned, val.shape, val.dtype)

    def _run(
        self, program: AclProgram, segment: GraphSegment, values: list[Any], lists: Callable[[], Mapping[int, list[int]]], first: bool
    ) -> None:
        """Runs a segment, on the stream. Values between segments are kept here; the host knows only those that it reads."""
        if first:
            self._held = [self._operand(program, i, values[i]) for i in range(program.file.operands)]
            self._held += [None] * (len(program.nodes) - len(self._held))
        exchange, waits = self._state.exchange(self._fingerprint), True
        with torch.no_grad(), self._state.running(self._running):
            # Nothing but events orders streams: half of the ranks are as early on the second as they can be, the others as late.
            for call in in_some_order(segment.calls, second_first=bool(self._state.rank % 2)):
                step = self._steps[call.number]
                if call.takes_lists and waits:
                    self._running.current, waits = step.label, False
                    for number, integers in lists().items():
                        self._held[number] = integers
                self._running.run_step(step, [self._held], exchange)
                if isinstance(memory := values[call.number], DeviceTensor):
                    memory.write(self._held[call.number], step.label)
            for number in (number for last in segment.calls[-1:] for number in last.frees):
                self._held[number] = None

    def _operand(self, program: AclProgram, number: int, tensor: DeviceTensor | None) -> torch.Tensor | None:
        return None if tensor is None or number not in program.reads else tensor.read(program.leaves[number] or f"number {number}")


def in_some_order(calls: Sequence[TorchCall], *, second_first: bool) -> Iterator[TorchCall]:
    """An order that two streams may take: one of them goes on until it waits for the other.

    Args:
        calls: of a segment; views and unpackings are there with what they are of.
        second_first: which goes on.
    """
    views: dict[int, list[TorchCall]] = {}
    for call in calls:
        if not call.launches:
            views.setdefault(next(iter(collected((call.args, call.kwargs), Value)), -1), []).append(call)

    def with_views(call: TorchCall) -> Iterator[TorchCall]:
        yield call
        for view in views.pop(call.number, ()):
            yield from with_views(view)

    here = {call.number for call in calls}
    for source in [source for source in views if source not in here]:
        for view in views.pop(source):
            yield from with_views(view)
    made, queues = set[int](), [deque(call for call in calls if call.launches and call.beside == beside) for beside in (False, True)]
    while any(queues):
        preferred, other = queues[second_first], queues[not second_first]
        queue = preferred if preferred and (preferred[0].waits < 0 or preferred[0].waits in made) else other
        made.add(queue[0].number)
        yield from with_views(queue.popleft())


class EmulatedSegment:
    """A captured segment, see `acl_graph.executable.Captured`.

    Args:
        values: operands and results, whose memory every replay reads and writes.
    """

    def __init__(self, engine: EmulatedAclEngine, program: AclProgram, segment: GraphSegment, values: list[Any]) -> None:
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
