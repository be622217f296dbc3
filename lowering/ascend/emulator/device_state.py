"""What the graphs of one emulated device share, and how they run on its stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....graphs.errors import LoweringError
from ..acl_graph.updates import Updates
from .communicator import EmulatedCommunicator
from .fault import Fault
from .memory import PinnedMemory
from .program import EmulatedProgram, Exchange, Step
from .stream import Stream


@dataclass
class FeatureMaps:
    """Memory of the values within steps, as torchair takes it for graphs that run one at a time (memory/Allocator.cpp).

    Attributes:
        blocks: sizes of what was taken, in bytes; kept for ever.
        limit_bytes: how much there is; None where it does not end.
    """

    blocks: list[int] = field(default_factory=list)
    limit_bytes: int | None = None

    def take(self, nbytes: int) -> None:
        """Finds the first block that is large enough, or else adds one.

        Raises:
            RuntimeError: there is too little left, as torch_npu says it.
        """
        if any(block >= nbytes for block in self.blocks):
            return
        if self.limit_bytes is not None and sum(self.blocks) + nbytes > self.limit_bytes:
            raise RuntimeError(f"NPU out of memory. Tried to allocate {nbytes} bytes; {sum(self.blocks)} of {self.limit_bytes} are taken")
        self.blocks.append(nbytes)


@dataclass
class DeviceState:
    """What the graphs of one device share.

    Attributes:
        rank: number of the process among all, which communicators bring.
        owners: communicator -> what has it for itself ("" for collectives) and an operator that uses it, of all graphs before.
        options: of the engine, once it is started.
        streams: how many captured graphs take.
        updates: the thread that gives captured graphs the lengths of a step.
        fault: of the device; None has none.
        steps: how many were launched.
        feature_maps: memory of GE graphs.
        serving: whether every step that follows is one of a request.
    """

    name: str
    stream: Stream
    pinned: PinnedMemory
    version: str
    rank: int = 0
    communicators: dict[str, EmulatedCommunicator] = field(default_factory=dict)
    owners: dict[str, tuple[str, str]] = field(default_factory=dict)
    options: dict[str, str] | None = None
    streams: int = 0
    feature_maps: FeatureMaps = field(default_factory=FeatureMaps)
    serving: bool = False
    updates: Updates = field(init=False)
    fault: Fault | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        self.updates = Updates(self.name)

    def count_step(self) -> None:
        """Counts a step that is launched; the device's fault may be this one's."""
        self.steps += 1
        if self.fault:
            self.fault.strike(self.steps, self.stream)

    def check_first_run(self, graph: str) -> None:
        """Refuses the first run of a graph in a serving step, which would load the graph for seconds, and fail where memory ends.

        Raises:
            LoweringError: steps are served already.
        """
        if self.serving:
            raise LoweringError(f"{graph} runs for the first time in a step that is served; legal is a step of padding before `ready`")

    def exchange(self, fingerprint: bytes) -> Exchange:
        """Runs operators that communicate, with the ranks of other processes.

        Args:
            fingerprint: of the graph, which the members of a communicator compare.
        """

        def run(step: Step, calls: list[Any]) -> Sequence[Any]:
            (call,) = calls
            communicator = self.communicators[step.group]
            received = communicator.exchange(step.label, step.tensors(call), fingerprint)
            members = [call if i == communicator.index else step.of_member(call, theirs) for i, theirs in enumerate(received)]
            return step.run_group(members, [communicator.index])

        return run

    @contextlib.contextmanager
    def running(self, program: EmulatedProgram) -> Iterator[None]:
        """Says, while a program runs on the stream, how far it is, and names the operator that fails.

        Raises:
            LoweringError: an operator fails: an index out of range or a shape that does not fit ends a device's step as well.
        """

        def progress() -> str:
            waiting = [state for communicator in self.communicators.values() if (state := communicator.waiting()) is not None]
            return "; ".join([f"operator {program.current}", *waiting])

        self.stream.describe(progress)
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, LoweringError) else f"{type(error).__name__}: "
            raise LoweringError(f"operator {program.current}: {kind}{error}") from error
