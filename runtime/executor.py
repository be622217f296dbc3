"""Turns what an engine needs of the thing that runs its steps into protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy.typing as npt

from ..graphs.types import Bucket, Limits

Inputs = Mapping[str, npt.NDArray[Any]]
"""Inputs of one step by name, as `buckets.pack` makes them."""

Outputs = Mapping[str, npt.NDArray[Any]]
"""Outputs of one step by name: at least `tokens` int32 [B,W] and, of decode, `counts` int32 [B]."""


class Executor(Protocol):
    """Device state and one executable per bucket.

    May be offered as well: `backends` (bucket name -> backend name), and `max_logprobs`, of how many of the most likely tokens its
    outputs tell log probabilities (0, which is what is assumed, tells none at all).
    """

    @property
    def limits(self) -> Limits:
        """Sizes that every bucket was built for."""
        ...

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What `run` takes; the same for the executor's lifetime, whichever backend runs them."""
        ...

    @property
    def vocab_size(self) -> int:
        """V: token ids are 0 to V-1."""
        ...

    def run(self, bucket: Bucket, inputs: Inputs) -> Outputs:
        """Runs one step."""
        ...

    def refresh(self) -> bool:
        """Loads executables that were finished meanwhile; returns whether any bucket changed."""
        ...

    def compiles(self) -> int:
        """Traces and compiles in this process since it was ready."""
        ...


@runtime_checkable
class GroupedExecutor(Executor, Protocol):
    """An executor over several dp groups: each has its own requests, pages and slots; `limits` are those of one group."""

    @property
    def groups(self) -> int:
        """How many."""
        ...

    def run_groups(self, bucket: Bucket, inputs: Sequence[Inputs]) -> Sequence[Outputs]:
        """Runs one step of all groups, in the same bucket; an item per group."""
        ...


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> Sequence[Outputs]:
        """Waits for the step, and returns an item per group; raises what made it fail."""
        ...


@runtime_checkable
class LaunchingExecutor(Executor, Protocol):
    """An executor whose steps run while its caller goes on: in the order in which they were launched, each from the state before it."""

    @property
    def run_ahead(self) -> int:
        """How many steps may be launched before the outcome of the one before them is known: 0 or 1."""
        ...

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> Pending:
        """Starts one step of all groups, in the same bucket; the inputs, an item per group, are not changed afterwards."""
        ...


class Done(NamedTuple):
    """A step that ran when it was launched."""

    outputs: Sequence[Outputs]

    def result(self) -> Sequence[Outputs]:
        """The outputs of every group."""
        return self.outputs


def group_count(executor: Executor) -> int:
    """How many dp groups an executor steps."""
    return executor.groups if isinstance(executor, GroupedExecutor) else 1


def most_run_ahead(executor: Executor) -> int:
    """How many steps an executor lets its caller run ahead."""
    return executor.run_ahead if isinstance(executor, LaunchingExecutor) else 0


def most_logprobs(executor: Executor) -> int:
    """Of how many of the most likely tokens an executor tells log probabilities."""
    return int(getattr(executor, "max_logprobs", 0))


def launcher(executor: Executor) -> Callable[[Bucket, Sequence[Inputs]], Pending]:
    """What starts one step of all groups of an executor, or runs it where the executor cannot start one."""
    if isinstance(executor, LaunchingExecutor):
        return executor.launch
    return lambda bucket, inputs: Done(run_step(executor, bucket, inputs))


def run_step(executor: Executor, bucket: Bucket, inputs: Sequence[Inputs]) -> Sequence[Outputs]:
    """Runs one step of all groups of an executor; an item per group."""
    if len(inputs) == 1:
        return [executor.run(bucket, inputs[0])]
    return cast(GroupedExecutor, executor).run_groups(bucket, inputs)
