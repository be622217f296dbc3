"""Runs graphs of torch operators on an NPU: captured with torch_npu's NPUGraph, or launched one by one.

Written against torch_npu 2.13.0 (npu/graphs.py, npu/_npugraph_handlers) and docs/zh/developer_notes/npugraph.md of Ascend/pytorch; it has
not run on a machine with CANN (docs/on-hardware.md).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ...artifact import graph_io
from ...device_error import named, with_way_out
from .. import packages
from .program import AclProgram, GraphSegment, TorchCall, Value, run
from .updates import Updates

_PACKAGES = {"_C_ascend": ("vllm_ascend.vllm_ascend_C", packages.LOAD["vllm-ascend"])}
"""Namespace of operators -> module that registers them, and what loads it (vllm-project/vllm-ascend at 182b75e, csrc/torch_binding.cpp)."""
CAPTURED_LENGTH = 1
"""Length of every sequence while a graph is captured. The workspace is that of the longest one
(`_npu_fused_infer_attention_score_get_max_workspace`), and every replay brings its own lengths."""


@dataclass(frozen=True)
class AclMemory:
    """What the captured graphs of one NPU share: they run one at a time, and so may use the same memory.

    Attributes:
        pool: of torch_npu's allocator, from `graph_pool_handle`.
        stream: on which graphs are captured; torch_npu wants the same one wherever a pool is shared.
        second: beside it; memory that a graph took on it is for graphs of the same.
        updates: the thread that gives replays their lengths.
    """

    pool: Any
    stream: Any
    second: Any
    updates: Updates

    @staticmethod
    def of(torch_npu: Any, name: str, enter: Callable[[], None]) -> AclMemory:
        """That of a device which is the current one."""
        return AclMemory(torch_npu.npu.graph_pool_handle(), torch_npu.npu.Stream(), torch_npu.npu.Stream(), Updates(name, enter))


class NpuAclEngine:
    """The engine of one executable on an NPU, see `acl_graph.executable.AclEngine`.

    Args:
        torch_npu: the module, with CANN.
        name: of the device, e.g. "npu:3".
        memory: of the device.
    """

    def __init__(self, torch_npu: Any, name: str, memory: AclMemory) -> None:
        self.name, self.torch_device, self.updates = name, torch.device(name), memory.updates
        self._torch_npu, self._memory = torch_npu, memory
        self._pinned: dict[int, torch.Tensor] = {}

    def find(self, name: str) -> Callable[..., Any]:
        """The operator as torch_npu or an operator package registers it; the package is imported.

        Raises:
            LoweringError: nothing of that name is registered, or its package is not installed or has no kernel of it for NPUs.
        """
        namespace, operator, _ = name.split(".") if name.count(".") == 2 else ("", "", "")
        if namespace in _PACKAGES:
            _check_package(namespace, operator)
        return graph_io.find_target(name)

    def place(self, tensor: torch.Tensor) -> str:
        """The device that a tensor lies on."""
        return str(tensor.device)

    def check(self, program: AclProgram, operands: Sequence[torch.Tensor | None]) -> None:
        """Operators check their operands themselves."""
        return

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Enters the stream of captures."""
        self._torch_npu.npu.synchronize()
        with self._torch_npu.npu.stream(self._memory.stream):
            yield
        self._torch_npu.npu.synchronize()

    def capture(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> NpuSegment:
        """Captures a segment into the memory that all graphs share.

        Raises:
            LoweringError: torch_npu or CANN refuses.
        """
        graph, local = self._torch_npu.npu.NPUGraph(), list(values)
        for number in segment.lists:
            local[number] = [CAPTURED_LENGTH] * values[number].numel()
        try:
            # Threads that wait for an earlier step or read lengths may call the device meanwhile.
            with self._torch_npu.npu.graph(
                graph,
                pool=self._memory.pool,
                stream=self._memory.stream,
                auto_dispatch_capture=bool(segment.updated),
                capture_error_mode="thread_local",
            ):
                self._run(segment, local)
        except RuntimeError as error:
            text = f"a segment of {len(segment.calls)} operators cannot be captured on {self.name}: {error}"
            raise LoweringError(with_way_out(text)) from error
        for number in segment.keeps:
            values[number] = local[number]
        return NpuSegment(graph, tuple(call for call in segment.calls if call.takes_lists))

    def launch(self, program: AclProgram, segment: GraphSegment, values: list[Any]) -> None:
        """Launches the operators of a segment.

        Raises:
            LoweringError: an operator is refused.
        """
        with named(f"an operator on {self.name}"):
            self._run(segment, values)

    def _run(self, segment: GraphSegment, values: list[Any]) -> None:
        """Runs operators on their streams. A capture takes the second in when that waits for the first."""
        if segment.streams == 1:
            run(segment.calls, values)
            return
        events = dict[int, Any]()
        self._memory.second.wait_stream(self._torch_npu.npu.current_stream())
        for beside, calls in itertools.groupby(segment.calls, key=lambda call: call.beside):
            with self._torch_npu.npu.stream(self._memory.second) if beside else contextlib.nullcontext():
                stream = self._torch_npu.npu.current_stream()
                for call in calls:
                    if call.waits >= 0:
                        stream.wait_event(events[call.waits])
                    run([call], values)
                    if call.awaited:
                        events[call.number] = stream.record_event()
        # Nobody waits for the last fetch, and a capture ends with all its streams joined.
        self._torch_npu.npu.current_stream().wait_stream(self._memory.second)

    def fetch(self, number: int, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """Queues a copy into page-locked memory."""
        if number not in self._pinned:
            self._pinned[number] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host = self._pinned[number]
        host.copy_(tensor, non_blocking=True)
        event = self._torch_npu.npu.Event()
        event.record()

        def read() -> list[int]:
            event.synchronize()
            return [int(value) for value in host.tolist()]

        return read


class NpuSegment:
    """A captured segment, see `acl_graph.executable.Captured`.

    Args:
        graph: an NPUGraph.
        updated: its operators that take lists, in the order in which torch_npu recorded them.
    """

    def __init__(self, graph: Any, updated: tuple[TorchCall, ...]) -> None:
        self._graph, self._updated = graph, updated

    def replay(self) -> None:
        """Queues it on the current stream."""
        self._graph.replay()

    def update(self, lists: Mapping[int, list[int]]) -> None:
        """Launches the recorded operators again with these lists, on torch_npu's own stream, and releases those that wait."""
        self._graph.update(cpu_update_input=[_lists_of(call, lists) for call in self._updated])


def _check_package(namespace: str, operator: str) -> None:
    module, load = _PACKAGES[namespace]
    try:
        load()
    except ImportError as error:
        raise LoweringError(
            f"the graph calls {namespace}::{operator} of {module}, which cannot be imported ({error}); install the package, or build"
            " without it in --operator-packages"
        ) from error
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{operator}", "PrivateUse1"):
        raise LoweringError(f"the graph calls {namespace}::{operator}; the installed {module} has no kernel of it for NPUs")


def _lists_of(call: TorchCall, lists: Mapping[int, list[int]]) -> dict[str, list[int]]:
    return {name: lists[value] for name, value in call.kwargs.items() if isinstance(value, Value) and int(value) in lists}
