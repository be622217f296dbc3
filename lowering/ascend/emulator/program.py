"""Runs the operators of a graph on CPU tensors, for one rank or for several that share the process.

GE's operators and torch's are two kinds of `Step`; their order, the exchange between ranks and the life of values are the same.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.types import Mesh
from ..convert import shape_of
from ..ge_file import GROUPS

Values = list[Any]
"""Values of one rank by number; None where one is not computed yet or no longer needed."""


class Step(abc.ABC):
    """One operator, with everything that is the same in each run. What a kind of operator needs to run on one rank is its call.

    Attributes:
        label: what messages call the operator.
        group: symbol, or communicator, over which it communicates; "" where it does not.
        exchange: what it exchanges there that shares a communicator with nothing else; "" for collectives.
        members, rank: size of the group and own number in it, where the operator says them.
        inputs, outputs: numbers of the values that it reads and gives; an input of -1 is absent.
        dead: numbers of the values that nobody reads afterwards.
    """

    label: object
    group: str
    exchange: str = ""
    members: int | None = None
    rank: int | None = None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...] = ()

    @abc.abstractmethod
    def call(self, values: Values) -> Any:
        """The operator with the values of one rank."""

    @abc.abstractmethod
    def run(self, call: Any) -> Any:
        """Computes it on one rank."""

    @abc.abstractmethod
    def run_group(self, calls: list[Any], wanted: Sequence[int] | None = None) -> Sequence[Any]:
        """Computes it on all members of its group: their calls in rank order -> the results of those wanted, or of all."""

    @abc.abstractmethod
    def tensors(self, call: Any) -> list[torch.Tensor]:
        """What it sends to the other members."""

    @abc.abstractmethod
    def of_member(self, call: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """The call of a member that sent these tensors, given one of this process."""

    @abc.abstractmethod
    def store(self, call: Any, results: Any, values: Values) -> None:
        """Puts results in their places."""


Exchange = Callable[[Step, list[Any]], Sequence[Any]]
"""Runs an operator that communicates: the calls of the ranks of this process -> the results of each of them."""
Observe = Callable[[Step, Any], None]


class EmulatedProgram:
    """Operators in an order in which they may run.

    Attributes:
        operands: how many it takes.
        steps: the operators.
        current: what runs now, for messages about a program that does not end.
        observe: called before each operator with the call of the first rank.
    """

    def __init__(self) -> None:
        self.operands, self.steps = 0, list[Step]()
        self.current: object = None
        self.observe: Observe | None = None

    def run_steps(self, ranks: Sequence[Values], exchange: Exchange) -> None:
        """Runs all operators on the values of each rank: every rank runs one before any runs the next."""
        with torch.no_grad():
            for step in self.steps:
                self.run_step(step, ranks, exchange)
        self.current = None

    def run_step(self, step: Step, ranks: Sequence[Values], exchange: Exchange) -> None:
        """Runs one operator."""
        self.current = step.label
        calls = [step.call(values) for values in ranks]
        if self.observe is not None:
            self.observe(step, calls[0])
        results = exchange(step, calls) if step.group else [step.run(call) for call in calls]
        for call, of_rank, values in zip(calls, results, ranks, strict=True):
            step.store(call, of_rank, values)
            for unused in step.dead:
                values[unused] = None


def set_last_uses(steps: Sequence[Step], live: Iterable[int]) -> None:
    """Notes the values that nobody reads after each operator; those in `live` are never among them."""
    last = {number: i for i, step in enumerate(steps) for number in (*step.outputs, *step.inputs)}
    dead: dict[int, list[int]] = {}
    for number, i in last.items():
        if number >= 0:
            dead.setdefault(i, []).append(number)
    kept_alive = set(live)
    for i, step in enumerate(steps):
        step.dead = tuple(number for number in dead.get(i, ()) if number not in kept_alive)


class MeshExchange:
    """Runs operators that communicate for all ranks of a mesh in this process: one call over the values of each group."""

    def __init__(self, mesh: Mesh) -> None:
        self._groups, self._size = {**mesh.groups(), **mesh.groups(GROUPS)}, mesh.size

    def __call__(self, step: Step, calls: list[Any]) -> Sequence[Any]:
        """The results of each rank.

        Raises:
            LoweringError: the mesh has no such group, or its members bring tensors of different shapes or dtypes.
        """
        if step.group not in self._groups:
            raise LoweringError(f"{step.label} communicates over group {step.group!r}; this mesh has {sorted(self._groups)}")
        results: dict[int, Any] = {}
        for members in self._groups[step.group]:
            _check_agreement(step, members, calls)
            results.update(zip(members, step.run_group([calls[rank] for rank in members]), strict=True))
        return [results[rank] for rank in range(self._size)]


def _check_agreement(step: Step, members: Sequence[int], calls: Sequence[Any]) -> None:
    first, *others = [[shape_of(tensor) for tensor in step.tensors(calls[rank])] for rank in members]
    for rank, shapes in zip(members[1:], others, strict=True):
        if shapes != first:
            raise LoweringError(f"{step.label}: rank {members[0]} brings {first}, rank {rank} {shapes}; legal is the same")
