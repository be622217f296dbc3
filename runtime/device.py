"""Turns what an engine needs of the thing that runs its steps into protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy.typing as npt

from ..graphs.types import Bucket, Limits

Inputs = Mapping[str, npt.NDArray[Any]]
"""Inputs of one step by name, as `buckets.pack` makes them."""

Outputs = Mapping[str, npt.NDArray[Any]]
"""Outputs of one step by name: at least `tokens` int32 [B,W]."""


class Executor(Protocol):
    """Device state and one executable per bucket. `backends` (bucket name -> backend name) may be offered as well."""

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


def group_count(executor: Executor) -> int:
    """How many dp groups an executor steps."""
    return executor.groups if isinstance(executor, GroupedExecutor) else 1


def run_step(executor: Executor, bucket: Bucket, inputs: Sequence[Inputs]) -> Sequence[Outputs]:
    """Runs one step of all groups of an executor; an item per group."""
    if len(inputs) == 1:
        return [executor.run(bucket, inputs[0])]
    return cast(GroupedExecutor, executor).run_groups(bucket, inputs)
