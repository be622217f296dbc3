"""The executor of rank 0 over all ranks of a mesh.

A step is one message to every other rank: the bucket, and the inputs of the rank's dp group. The ranks of a tp group compute the same
outputs, so only the first rank of each group returns them, and only those that the engine reads.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...graphs.steps.kind import SegmentSizes
from ...graphs.steps.table import STEP_KINDS
from ...graphs.types import Bucket, Limits
from ..executor import Executor, Inputs, Numbers, Outputs, Pending, check_serving, check_step
from ..kv_transfer.layout import Region
from ..kv_transfer.transfer_engine import RegisteredMemory
from ..steps.pack import without_unused
from .control_plane import ControlPlane, RankError, error_text
from .messages import encode

_ASKED = {output.name: output.asked for kind in STEP_KINDS.values() for output in kind.outputs}

OUTPUTS = tuple(name for name, asked in _ASKED.items() if asked == ())
"""Outputs that the engine reads of every step, if its bucket has them."""


def select_outputs(names: Sequence[str], inputs: Inputs, outputs: Outputs) -> Outputs:
    """The outputs of one dp group that rank 0 reads: those of these names, and those that a row asks for (`StepOutput.asked`)."""
    more = [name for name, asked in _ASKED.items() if any(flag in inputs and inputs[flag].any() for flag in asked or ())]
    return {name: outputs[name] for name in (*names, *more) if name in outputs}


@dataclass(frozen=True)
class ShardedStep:
    """A step that all ranks run.

    Attributes:
        number: from 1.
        local: the step of rank 0; None where its group is not among these.
        inputs: of every dp group.
    """

    executor: ShardedExecutor
    number: int
    bucket: Bucket
    local: Pending | None
    inputs: Sequence[Inputs]

    def result(self) -> Sequence[Outputs]:
        """Waits for all dp groups and returns the outputs of each.

        Raises:
            RankError: when a rank failed or is lost, this one included; the ranks end then.
        """
        return self.executor.finish(self)


class ShardedExecutor:
    """All ranks of a mesh; this process is rank 0.

    Attributes:
        local: the executor of rank 0.

    Args:
        local: of rank 0.
        control_plane: of all other ranks; each of them loads an executor.
        step_timeout_s: how much longer the ranks of other dp groups may take for a step than this one.
        outputs: names of the outputs that steps return, if their bucket has them; log probabilities are returned if a row asks.

    Raises:
        RankError: another rank could not get ready.
    """

    def __init__(self, local: Executor, control_plane: ControlPlane, *, step_timeout_s: float, outputs: Sequence[str] = OUTPUTS) -> None:
        self.control_plane, self.local, self._step_timeout_s, self._outputs = control_plane, local, step_timeout_s, tuple(outputs)
        mesh = control_plane.mesh
        self.groups = mesh.axis("dp")
        self._group = {rank: mesh.coordinates(rank)["dp"] for rank in range(mesh.size)}
        self._first_rank = [min(rank for rank, group in self._group.items() if group == i) for i in range(self.groups)]
        self._steps = self._first_group = 0
        # No timeout, because loading may take long; a rank that ends or falls silent meanwhile ends the wait.
        ready = control_plane.gather(control_plane.ranks, "ready", None)
        self.missing = _missing(local, {rank: message.fields.get("missing", {}) for rank, message in ready.items()})
        self.buckets = tuple(bucket for bucket in local.buckets if bucket not in self.missing)

    def of_groups(self) -> list[ShardedExecutor]:
        """An executor for each dp group, each for a thread of its own, where groups share no collective; this one runs no steps then."""
        self.control_plane.split(self._group)
        executors = [copy.copy(self) for _ in range(self.groups)]
        for group, executor in enumerate(executors):
            executor.groups, executor._first_group = 1, group
        return executors

    @property
    def limits(self) -> Limits:
        """Sizes of one dp group's pools."""
        return self.local.limits

    @property
    def run_ahead(self) -> int:
        """That of this rank's executor."""
        return self.local.run_ahead

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.local.vocab_size

    @property
    def max_logprobs(self) -> int:
        """Number of most likely tokens whose log probabilities steps return; 0 if they return none."""
        return self.local.max_logprobs

    @property
    def recurrent(self) -> bool:
        """Whether the model has recurrent states."""
        return self.local.recurrent

    @property
    def any_size(self) -> frozenset[str]:
        """Ranks share the rows of a bucket, so that it takes no others."""
        return frozenset()

    @property
    def segments(self) -> SegmentSizes | None:
        """What encode buckets take."""
        return self.local.segments

    @property
    def fixed_tokens(self) -> float | None:
        """What every step costs whatever its size, in tokens."""
        return self.local.fixed_tokens

    @property
    def max_ranked(self) -> int:
        """Number of most likely tokens that sampling may have to rank; 0 if any number."""
        return self.local.max_ranked

    @property
    def backends(self) -> Mapping[str, str]:
        """Backend by bucket name; the same on all ranks."""
        return self.local.backends

    @property
    def regions(self) -> tuple[Region, ...]:
        """Where the pools of rank 0 lie; the other ranks say it themselves."""
        return self.local.regions

    @property
    def areas(self) -> tuple[RegisteredMemory, ...]:
        """Those of rank 0."""
        return self.local.areas

    def enter(self) -> None:
        """Prepares the calling thread (`Executor.enter`)."""
        self.local.enter()

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> ShardedStep:
        """Starts one step on all ranks.

        Args:
            bucket: one of `buckets`, for all groups.
            inputs: of every dp group, as `steps.pack.pack` returns them.

        Raises:
            SpecError: for a bucket that the artifact does not have, or inputs for another number of groups.
            RankError: when a rank failed or is lost, this one included; the ranks end then.
        """
        check_step(self, bucket, inputs)
        self.control_plane.check()
        self._steps += 1
        frames = [encode("step", step=self._steps, bucket=bucket.name, inputs=without_unused(arrays)) for arrays in inputs]
        for group, frame in enumerate(frames):
            self._send(group, frame)
        try:
            local = None if self._first_group else self.local.launch(bucket, inputs[:1])
            return ShardedStep(self, self._steps, bucket, local, inputs)
        except Exception as error:
            raise self._failure(bucket, error) from error

    def finish(self, step: ShardedStep) -> Sequence[Outputs]:
        """What `ShardedStep.result` returns; steps are finished in the order of their launch."""
        own = list[Outputs]()
        if step.local is not None:
            try:
                own = [select_outputs(self._outputs, step.inputs[0], outputs) for outputs in step.local.result()]
            except Exception as error:
                raise self._failure(step.bucket, error) from error
        others = self._first_rank[self._first_group + len(own) : self._first_group + self.groups]
        answers = self.control_plane.gather(others, "outputs", self._step_timeout_s, step.number)
        return [*own, *(answers[rank].fields["outputs"] for rank in others)]

    def start_decoding(self, group: int, request_slot: int, state_slot: int, position: int, token: int, offset: int = 0) -> None:
        """Writes the request slot on all ranks of the group (`Executor.start_decoding`)."""
        fields = {"request_slot": request_slot, "state_slot": state_slot, "position": position, "token": token, "offset": offset}
        self._send(group, encode("start", **fields))
        if not group + self._first_group:
            self.local.start_decoding(0, request_slot, state_slot, position, token, offset)

    def receive(self, group: int, numbers: Numbers, ready: Callable[[], None]) -> None:
        """Asks all ranks of the group: the steps of some may end after those of its first one (`Executor.receive`)."""
        ranks = [rank for rank, own in self._group.items() if own == group + self._first_group]
        waiting, lock = set(ranks), threading.Lock()

        def answered(rank: int, fields: Mapping[str, Any]) -> None:
            with lock:
                # One that is lost stays.
                waiting.difference_update(() if fields["reason"] else (rank,))
                last = not waiting
            if last:
                ready()

        for rank in ranks:
            if rank:
                self.control_plane.ask(rank, "receive", functools.partial(answered, rank), numbers=dict(numbers))
            else:
                self.local.receive(0, numbers, lambda: answered(0, {"reason": ""}))

    def landed(self, group: int, numbers: Numbers) -> None:
        """Tells all ranks of the group, before their next step (`Executor.landed`)."""
        self._send(group, encode("landed", numbers=dict(numbers)))
        if not group + self._first_group:
            self.local.landed(0, numbers)

    def refresh(self) -> bool:
        """Changes nothing: all ranks keep the executables that they started with.

        Raises:
            RankError: a rank was lost since the last step.
        """
        self.control_plane.check()
        return False

    def give_back(self, numbers: Sequence[Numbers]) -> None:
        """Frees memory of this rank; the others are told nothing, and keep theirs."""
        if not self._first_group:
            self.local.give_back(numbers[:1])

    def compiles(self) -> int:
        """Of this process."""
        return self.local.compiles()

    def _send(self, group: int, frame: bytes) -> None:
        """Sends a message to all ranks of a group but rank 0."""
        for rank in self.control_plane.ranks:
            if self._group[rank] == group + self._first_group:
                self.control_plane.send(rank, frame)

    def _failure(self, bucket: Bucket, error: Exception) -> RankError:
        """The cause of an error in a local step: usually the end of another rank, which a collective noticed first."""
        failure = self.control_plane.wait_for_failure()
        if failure is None:
            self.control_plane.fail(0, f"{bucket.name}: {error_text(error)}", lost=False)
            failure = self.control_plane.concluded_failure()
        return failure


def _missing(local: Executor, by_rank: Mapping[int, Mapping[str, str]]) -> dict[Bucket, str]:
    """The buckets that some rank cannot run, with the first such rank's reason; no rank runs them then.

    Raises:
        LoweringError: what is left cannot serve.
    """
    missing = dict(local.missing)
    for bucket in local.buckets:
        reasons = [f"rank {rank}: {lacking[bucket.name]}" for rank, lacking in by_rank.items() if bucket.name in lacking]
        missing |= {bucket: reasons[0]} if reasons else {}
    check_serving([bucket for bucket in local.buckets if bucket not in missing], missing)
    return missing
