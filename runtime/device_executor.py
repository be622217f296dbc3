"""The executor on a device with memory of its own: parameters and pools are put there once; a step is a copy, a launch and an event."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..graphs.errors import ArtifactError, LoweringError
from ..graphs.steps.inputs import MAX_RANKED, OPTIONAL_ROWS
from ..graphs.steps.request_slot import start as request_slot_start
from ..graphs.steps.table import kind_of
from ..graphs.types import COORDS, Bucket, Leaf, Limits, Mesh, Rules
from ..lowering.artifact.artifact import Artifact, GraphEntry
from ..lowering.artifact.fixed_cost import fixed_tokens
from ..lowering.artifact.shards import local_leaves, local_signature
from ..lowering.device import Device, DeviceExecutable, Event, MemoryPart
from ..lowering.switches import RUN_AHEAD
from .device_params import DeviceParams, LoadParams
from .executor import (
    ExecutorError,
    Inputs,
    Numbers,
    Outputs,
    check_serving,
    check_step,
    clear_state,
    compile_evidence,
    has_recurrent_states,
    segment_sizes,
)
from .kv_transfer.layout import Region, regions
from .kv_transfer.transfer_engine import RegisteredMemory
from .staging import InputBuffer, OutputBuffers, PackedLayout
from .steps.pack import without_unused
from .warm_up import BEGINS, CACHED, COMPILED, LIMIT_S, Agree, Report, WarmUp, in_order

log = logging.getLogger(__name__)

AREA_ALIGNMENT = 2 << 20
"""Of addresses and sizes that links of Ascend devices reach (Mooncake, ascend_direct_transport.md)."""


class LaunchedStep(NamedTuple):
    """A step on a device, whose outputs are on their way to host memory.

    Attributes:
        event: behind the copies of the outputs.
        outputs: host memory by name; the step after the next one overwrites it.
        keep: device memory that must live until the event.
    """

    event: Event
    outputs: Mapping[str, torch.Tensor]
    keep: Sequence[torch.Tensor]
    timeout_s: float | None

    def result(self) -> Sequence[Outputs]:
        """Waits for the step and returns its outputs; raises what made it fail."""
        try:
            self.event.wait(self.timeout_s)
        except LoweringError as error:
            raise ExecutorError(str(error)) from error
        return [{name: value.numpy().copy() for name, value in self.outputs.items()}]


class DeviceExecutor:
    """Parameters, state pools and executables of one rank of an artifact, on one device.

    Everything is allocated once. All buckets run over the same parameters, pools and input buffer, so that changing the bucket is
    choosing another executable. `launch` returns before the step has run, and the next step may be queued behind it.

    Each bucket is compiled and runs a step of padding, the largest first (warm_up.py). One that the device refuses, as its compiler does
    or where its memory is too small, is left out on all ranks and said to be (`missing`); other buckets run its steps.

    Attributes:
        device: of this rank.
        state: pools by name, in the device's memory.

    Args:
        artifact: opened and checked.
        device: of this rank.
        load_params: reads parameters, one at a time.
        rank: number of this process among all.
        communicators: of this rank, by symbol (`Device.communicators`); empty for an artifact of one device.
        cache_dir: an existing directory of compiled graphs; None keeps none.
        step_timeout_s: how long a step may take before it counts as hanging; None waits for ever.
        report: called after each bucket.
        agree: of all ranks that start at the same time.
        off: switches (`lowering.switches`) that are off.

    Raises:
        ArtifactError: a file is missing or does not match the manifest, or a bucket has no executable.
        SpecError: the artifact has no such rank.
        LoweringError: an executable is not of this device; no prefill or no decode bucket can run, with the reasons; or the device failed.
    """

    groups = 1

    def __init__(
        self,
        artifact: Artifact,
        device: Device,
        load_params: LoadParams,
        *,
        rank: int = 0,
        communicators: Mapping[str, str] | None = None,
        cache_dir: Path | None = None,
        step_timeout_s: float | None = None,
        report: Report = lambda bucket, seconds, outcome: None,
        agree: Agree = lambda reason, limit_s: reason,
        off: Collection[str] = (),
    ) -> None:
        manifest, self.run_ahead = artifact.manifest, int(RUN_AHEAD not in off)
        mesh, rules = Mesh.parse(manifest.mesh), Rules.of(manifest.rules)
        self.device, self._step_timeout_s, self._rules = device, step_timeout_s, rules
        self.limits: Limits = manifest.limits
        self.vocab_size = int(manifest.model["vocab_size"])
        self.max_logprobs = max((entry.max_logprobs for entry in manifest.graphs), default=0)
        self.recurrent = has_recurrent_states(manifest.state)
        self.fixed_tokens = fixed_tokens(manifest)
        self.segments = segment_sizes(manifest)
        self.any_size = frozenset[str]()
        self.max_ranked = MAX_RANKED if self.vocab_size > MAX_RANKED else 0
        self._coords = mesh.coords(rank).numpy()
        signatures = {entry.bucket: local_signature(manifest, entry) for entry in manifest.graphs}
        executables = {entry.bucket: _open(device, artifact, entry, rank, communicators or {}) for entry in manifest.graphs}
        for executable in executables.values() if off else ():
            executable.switch_off(off)
        leaves = local_leaves(manifest.params, mesh, rules)
        self._leaves = local_leaves(manifest.state, mesh, rules)
        layout = _layout(self._leaves)
        self._area = _aligned_zeros(device, layout.nbytes)
        views = layout.views(self._area)
        state = [views[leaf.path] for leaf in self._leaves]
        self.state: Mapping[str, torch.Tensor] = {leaf.name: pool for leaf, pool in zip(self._leaves, state, strict=True)}
        slots = self.state["state.request_slots"]
        # A row for each, so that none is written while its copy is queued.
        self._starts = device.pinned(slots.nbytes).view(slots.dtype).view(slots.shape)
        self._inputs = InputBuffer(device, {b: _layout(s.inputs) for b, s in signatures.items()}, self.run_ahead, step_timeout_s)
        self._outputs = OutputBuffers(device, {b: _layout(s.outputs) for b, s in signatures.items()}, self.run_ahead)
        places = {entry.bucket: manifest.operands(entry.bucket) for entry in manifest.graphs}
        others = {b: [*(state[i] for i in pools), *self._inputs.arrays[b].values()] for b, (_, pools) in places.items()}
        self._operands: dict[Bucket, list[torch.Tensor | None]] = {}
        # Kinds of buckets that read other parameters have nothing in common.
        for read in sorted({tuple(params) for params, _ in places.values()}):
            own = tuple(leaves[i] for i in read)
            same = {bucket: executables[bucket] for bucket, (params, _) in places.items() if tuple(params) == read}
            params = DeviceParams(device, own, same, {bucket: len(own) + len(others[bucket]) for bucket in same})
            params.load(load_params)
            self._operands |= {bucket: params.operands(bucket, others[bucket]) for bucket in same}
        self.missing: dict[Bucket, str] = {}
        limit_s = None if step_timeout_s is None else max(LIMIT_S, step_timeout_s)
        self._executables = self._start(manifest.graphs, executables, WarmUp(device, agree, cache_dir, limit_s), report)
        # Padding leaves no trace.
        self._area.zero_()
        device.ready()
        self._compiles_before_ready = compile_evidence()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What `launch` takes."""
        return tuple(sorted(self._executables))

    @property
    def backends(self) -> Mapping[str, str]:
        """Backend by bucket name."""
        return {bucket.name: executable.backend for bucket, executable in sorted(self._executables.items())}

    @property
    def regions(self) -> tuple[Region, ...]:
        """Where this rank's pools lie in the device's memory (`Executor.regions`)."""
        addresses = {leaf.path: self.state[leaf.name].data_ptr() for leaf in self._leaves}
        return regions(self._leaves, self.limits, addresses, self._rules)

    @property
    def areas(self) -> tuple[RegisteredMemory, ...]:
        """The one area of all pools (`Executor.areas`)."""
        return (RegisteredMemory(self._area.data_ptr(), self._area.nbytes),)

    def enter(self) -> None:
        """Makes the device that of the calling thread."""
        self.device.enter()

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> LaunchedStep:
        """Queues one step, which advances the state in place.

        Args:
            bucket: one of `buckets`.
            inputs: one item: arrays by name, as `steps.pack.pack` returns them.

        Returns:
            `tokens` int32 [B, W], in decode `counts` int32 [B], and the bucket's other outputs (models/step.py); of an encode bucket
            `finite` int32 [B].

        Raises:
            SpecError: for a bucket that cannot run, or inputs for more than one dp group.
            ExecutorError: the device refuses the step, or an earlier one failed or hangs; it can run no more.
        """
        check_step(self, bucket, inputs)
        try:
            self._inputs.send(bucket, {**without_unused(inputs[0]), COORDS: self._coords})
            results = self._executables[bucket](self._operands[bucket])
            outputs = self._outputs.receive(bucket, results)
            event = self.device.record()
        except (LoweringError, RuntimeError) as error:
            raise ExecutorError(str(error)) from error
        return LaunchedStep(event, outputs, results, self._step_timeout_s)

    def start_decoding(self, group: int, request_slot: int, state_slot: int, position: int, token: int, offset: int = 0) -> None:
        """Queues the copy of the request slot of the one dp group (`Executor.start_decoding`).

        Raises:
            ExecutorError: the device has failed.
        """
        host = self._starts[request_slot]
        host.copy_(request_slot_start(position, [token], self.limits, offset))
        try:
            if not position:
                clear_state(self._leaves, [self.state[leaf.name] for leaf in self._leaves], state_slot)
            self.state["state.request_slots"][request_slot].copy_(host, non_blocking=True)
        except (LoweringError, RuntimeError) as error:
            raise ExecutorError(str(error)) from error

    def receive(self, group: int, numbers: Numbers, ready: Callable[[], None]) -> None:
        """Tells the device what is going to be written past its stream (`Executor.receive`)."""
        self.device.expect(self._parts(numbers))
        ready()

    def landed(self, group: int, numbers: Numbers) -> None:
        """Tells the device what was (`Executor.landed`).

        Raises:
            ExecutorError: the device has failed.
        """
        try:
            self.device.arrived(self._parts(numbers))
        except LoweringError as error:
            raise ExecutorError(str(error)) from error

    def refresh(self) -> bool:
        """Changes nothing: a device keeps the executables that it started with."""
        return False

    def give_back(self, numbers: Sequence[Numbers]) -> None:
        """Changes nothing: a device keeps its pools whole."""

    def compiles(self) -> int:
        """Traces and compiles of this process since it was ready, and compiler modules that it imported since."""
        return compile_evidence() - self._compiles_before_ready

    def close(self) -> None:
        """Waits for the device and frees it."""
        self.device.close()

    def _parts(self, numbers: Numbers) -> Iterator[MemoryPart]:
        for region in self.regions:
            pool = self.state[f"state.{region.name}"]
            for number in numbers.get(region.axis, ()):
                first = number * region.stride_bytes
                yield MemoryPart(pool, first, first + region.item_bytes)

    def _start(
        self, graphs: Sequence[GraphEntry], executables: Mapping[Bucket, DeviceExecutable], warm_up: WarmUp, report: Report
    ) -> dict[Bucket, DeviceExecutable]:
        started = {}
        # Ranks read weights for as long as they need; what follows has limits.
        warm_up.agree("", None)
        for entry in in_order(graphs):
            bucket, began = entry.bucket, time.monotonic()
            report(bucket, 0.0, BEGINS)
            # Its inputs are legal, where memory of zeros is not.
            self._inputs.pad(bucket, kind_of(bucket).padding)
            outcome = warm_up.start(entry, executables[bucket], self._operands[bucket])
            if outcome in (COMPILED, CACHED):
                started[bucket] = executables[bucket]
            else:
                self.missing[bucket] = outcome
                log.error("%s cannot be compiled or run, other buckets run its steps: %s", bucket.name, outcome)
            report(bucket, time.monotonic() - began, outcome)
        check_serving(started, self.missing)
        return started


def _open(device: Device, artifact: Artifact, entry: GraphEntry, rank: int, communicators: Mapping[str, str]) -> DeviceExecutable:
    if entry.compiled is None:
        raise ArtifactError(f"{entry.bucket.name} has no executable for {device.name}; legal is an artifact built for it")
    return device.open(artifact.path / entry.compiled.file, rank, communicators)


def _aligned_zeros(device: Device, nbytes: int) -> torch.Tensor:
    """Memory of zeros, uint8, whose address and size are multiples of AREA_ALIGNMENT."""
    size = -(-nbytes // AREA_ALIGNMENT) * AREA_ALIGNMENT
    memory = device.zeros((size + AREA_ALIGNMENT,), torch.uint8)
    first = -memory.data_ptr() % AREA_ALIGNMENT
    return memory[first : first + size]


def _layout(leaves: Sequence[Leaf]) -> PackedLayout:
    return PackedLayout.of({leaf.path: leaf.aval for leaf in leaves}, last=tuple(OPTIONAL_ROWS))
