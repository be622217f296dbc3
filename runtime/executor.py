"""The interface between the engine and what runs its steps, the same on every device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
import torch

from ..graphs import compile_count
from ..graphs.errors import LoweringError, NpucompileError, SpecError
from ..graphs.steps.kind import SegmentSizes
from ..graphs.steps.prefill import PREFILL
from ..graphs.steps.table import kind_of
from ..graphs.types import PICTURE_ROWS, Bucket, Leaf, Limits
from ..lowering.artifact.manifest import Manifest
from .kv_transfer.layout import Region
from .kv_transfer.transfer_engine import RegisteredMemory

Inputs = Mapping[str, npt.NDArray[Any]]
"""Inputs of one dp group's step by name, as `steps.pack.pack` returns them."""

Outputs = Mapping[str, npt.NDArray[Any]]
"""Outputs of one dp group's step by name: at least `tokens` int32 [B,W] and, of decode, `counts` int32 [B];
of encode `finite` int32 [B]."""

Numbers = Mapping[str, Sequence[int]]
"""Numbers of pages and state slots of one dp group, by axis of pools: "pages" and "slots"."""

PAGED_AXES = ("pages", "request_slots", PICTURE_ROWS)
"""First axes of pools that hold nothing of a prompt but its pages: a request slot is written at its end, rows of pictures are shared."""

COMPILER_MODULES = ("torch._inductor.compile_fx", "torch._dynamo.convert_frame")
"""Modules that a process imports only to compile."""


class ExecutorError(NpucompileError):
    """Raised when a device or a rank is lost: no step can run after that."""


class Pending(Protocol):
    """A launched step."""

    def result(self) -> Sequence[Outputs]:
        """Waits for the step and returns its outputs, an item per dp group; raises what made the step fail."""
        ...


class FinishedStep(NamedTuple):
    """A `Pending` of an executor whose steps run while they are launched."""

    outputs: Sequence[Outputs]

    def result(self) -> Sequence[Outputs]:
        """The outputs, an item per dp group."""
        return self.outputs


class Executor(Protocol):
    """Device state, and one executable per bucket.

    Each dp group has its own requests, pages and slots; all groups run every step together, in one bucket. Steps run in the order in
    which they are launched, each on the state that the one before it left.
    """

    @property
    def limits(self) -> Limits:
        """Sizes that every bucket was built for; those of one dp group."""
        ...

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What `launch` takes; the same for the executor's lifetime, whichever backend runs them."""
        ...

    @property
    def any_size(self) -> frozenset[str]:
        """Kinds of buckets that run steps of any rows and, of prefill, tokens a row, up to as many tokens as the bucket has and chunks as
        long as the longest: their sizes are values. None where there are several dp groups or ranks."""
        ...

    @property
    def missing(self) -> Mapping[Bucket, str]:
        """Buckets of the artifact that cannot run, each with the reason; their steps run in others."""
        ...

    @property
    def vocab_size(self) -> int:
        """V: token ids are 0 to V-1."""
        ...

    @property
    def max_logprobs(self) -> int:
        """Number of most likely tokens whose log probabilities steps return; 0 if they return none."""
        ...

    @property
    def max_ranked(self) -> int:
        """Number of most likely tokens that sampling with top_k and top_p may have to rank; 0 if any number."""
        ...

    @property
    def segments(self) -> SegmentSizes | None:
        """What encode buckets take; None without any."""
        ...

    @property
    def fixed_tokens(self) -> float | None:
        """What every step costs whatever its size, in tokens (`lowering/artifact/fixed_cost.py`); None where nobody knows."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether the model has recurrent states, in state slots."""
        ...

    @property
    def groups(self) -> int:
        """Number of dp groups."""
        ...

    @property
    def run_ahead(self) -> int:
        """How many steps may be launched before the result of the one before them is known: 0 or 1."""
        ...

    @property
    def backends(self) -> Mapping[str, str]:
        """Backend by bucket name."""
        ...

    @property
    def regions(self) -> tuple[Region, ...]:
        """Where the pools of this process's rank lie, of those that travel with a request; the same for the executor's lifetime.

        Raises:
            LayoutError: there is a pool that no handover knows.
        """
        ...

    @property
    def areas(self) -> tuple[RegisteredMemory, ...]:
        """Memory of this process's rank in which those pools lie, as a transfer engine registers it."""
        ...

    def enter(self) -> None:
        """Prepares the calling thread for what reads or writes pools past all steps."""
        ...

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> Pending:
        """Starts one step of all dp groups.

        Args:
            bucket: one of `buckets`, for all groups.
            inputs: an item per group, as `steps.pack.pack` returns them for the bucket or, where its kind is among `any_size`, for the rows
                and tokens that the step has; the caller does not change them afterwards.

        Raises:
            SpecError: for an unknown bucket, or inputs for another number of groups.
        """
        ...

    def start_decoding(self, group: int, request_slot: int, state_slot: int, position: int, token: int, offset: int = 0) -> None:
        """Has the next decode step of a request slot start as a prefill step would have left it: with this token at this position, behind
        the state in the first of the request's state slots, and without drafts. At position 0 there is no state, so the slot is cleared.
        Queued behind the steps that were launched.

        Args:
            offset: what is added to the position where there are pictures before it (`picture_spans.position_offset`).
        """
        ...

    def receive(self, group: int, numbers: Numbers, ready: Callable[[], None]) -> None:
        """Says that peers are going to write pages and slots past all steps. No step that is launched from now on uses them before
        `landed`; those of this process that were launched before have ended.

        Args:
            ready: called once peers may, by any thread; never if a rank is lost.
        """
        ...

    def landed(self, group: int, numbers: Numbers) -> None:
        """Says that they were written; the steps that are launched from now on read them."""
        ...

    def refresh(self) -> bool:
        """Loads executables that a build has finished since the last call; returns whether any bucket changed."""
        ...

    def give_back(self, numbers: Sequence[Numbers]) -> None:
        """Frees memory of pages and state slots, where the device can; called while no step is in flight.

        Args:
            numbers: an item per dp group: what no step reads before a step has written it.
        """
        ...

    def compiles(self) -> int:
        """Number of traces and compiles in this process since the executor was ready."""
        ...


def segment_sizes(manifest: Manifest) -> SegmentSizes | None:
    """What the encode buckets of an artifact take; None where it has none."""
    entry = next((entry for entry in manifest.graphs if kind_of(entry.bucket).tower), None)
    if entry is None:
        return None
    shapes = {leaf.path: leaf.aval.shape for leaf in entry.inputs}
    (_, patches, width), (_, rows) = shapes["patches"], shapes["picture_rows"]
    return SegmentSizes(width, patches // rows)


def has_recurrent_states(state: Sequence[Leaf]) -> bool:
    """Whether any pool of these leaves holds what pages do not, so that a request cannot begin after pages alone."""
    return any(leaf.aval.axes[0] not in PAGED_AXES for leaf in state)


def clear_state(leaves: Sequence[Leaf], pools: Sequence[torch.Tensor], state_slot: int) -> None:
    """Sets the recurrent states of a slot to 0, as they are before a request's first token."""
    for leaf, pool in zip(leaves, pools, strict=True):
        if leaf.aval.axes[0] not in PAGED_AXES:
            pool[state_slot].zero_()


def compile_evidence() -> int:
    """Traces and compiles that this process has made, and compiler modules that it has imported."""
    return compile_count.count() + sum(name in sys.modules for name in COMPILER_MODULES)


def check_step(executor: Executor, bucket: Bucket, inputs: Sequence[Inputs]) -> None:
    """Refuses a step that an executor cannot run.

    Raises:
        SpecError: for an unknown bucket, or inputs for another number of groups.
    """
    if bucket not in executor.buckets:
        raise SpecError(f"no bucket {bucket.name}; the artifact has {', '.join(b.name for b in executor.buckets)}")
    if len(inputs) != executor.groups:
        raise SpecError(f"inputs for {len(inputs)} dp groups; the executor has {executor.groups}")


def check_serving(buckets: Collection[Bucket], missing: Mapping[Bucket, str]) -> None:
    """Refuses buckets that cannot serve.

    Raises:
        LoweringError: of a kind that the artifact has there is none among them; with the reason of each that is missing.
    """
    for kind in sorted({bucket.kind for bucket in (*buckets, *missing)}) or (PREFILL.name,):
        if not any(bucket.kind == kind for bucket in buckets):
            reasons = "; ".join(f"{bucket.name}: {reason}" for bucket, reason in sorted(missing.items()) if bucket.kind == kind)
            raise LoweringError(f"no {kind} bucket can run, and serving needs at least one: {reasons or 'the artifact has none'}")


class ExecutorFacts(NamedTuple):
    """What says which requests an executor can serve (`picture_admission.check_served`), for who has no executor."""

    limits: Limits
    buckets: tuple[Bucket, ...]
    vocab_size: int
    max_logprobs: int
    max_ranked: int
    segments: SegmentSizes | None
    groups: int

    @staticmethod
    def of(executor: Executor) -> ExecutorFacts:
        """Those of an executor."""
        return ExecutorFacts(*(getattr(executor, name) for name in ExecutorFacts._fields))
