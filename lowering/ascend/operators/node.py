"""An operator of a graph as rules read it: the same for graphs of GE and of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....graphs.errors import LoweringError
from .tensor_type import TensorType


@dataclass(frozen=True)
class Node:
    """One operator.

    Attributes:
        name: in its graph.
        type: GE's name of the operator, "GroupedMatmul"; of a torch operator what runs it, which may be an aclnn function, and "" for a
            view; "Data" for an operand of the graph.
        inputs: type of each input that is there, by its name; those of a list are numbered ("weight0").
        constants: names of the inputs that are computed from constants alone: known when the graph is compiled.
        outputs: type of each output by its name; one that nobody reads and the graph does not declare is absent.
        attributes: values by name, without those that begin with "_".
        private: names of attributes that begin with "_" and are none that every operator may have.
        called: the torch operator; "" in a GE graph.
        unnamed: arguments of the torch operator that the table has no name for.
        strided: names of the inputs whose elements do not lie side by side in row-major order; a GE graph has none.
        input: the tensors that it reads, "producer:number of the result", by position; "" for one that is absent.
        slots: name of each of `input`.
        after: operators that must run before it although it does not read them.
        results: how many tensors it gives, "name:0" and so on; none of a torch operator that returns what it writes.
        group: symbol of the group that it communicates over; "" where it does not.
        stream: label of its stream; "" for the first.
        operand: number of the operand that a "Data" stands for.
    """

    name: str
    type: str
    inputs: Mapping[str, TensorType] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    outputs: Mapping[str, TensorType] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    private: frozenset[str] = frozenset()
    called: str = ""
    unnamed: frozenset[str] = frozenset()
    strided: frozenset[str] = frozenset()
    input: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    results: int = 0
    group: str = ""
    stream: str = ""
    operand: int = -1

    @property
    def label(self) -> str:
        """What a message calls it: "npu.npu_linear.default by aclnnMm" in a graph of torch operators."""
        return f"{self.called} by {self.type}" if self.called else self.type

    @functools.cached_property
    def key(self) -> str:
        """What its legality depends on: equal for the copies of an operator in the layers of a model."""
        sets = map(sorted, (self.private, self.unnamed, self.constants, self.strided))
        return repr((self.type, self.called, self.attributes, *sets, self.inputs, self.outputs))

    def copy(self, **names: Any) -> Node:
        """Its copy in another layer, with the fields and cached properties that differ; `replace` would take five times as long."""
        vars(other := object.__new__(Node)).update(vars(self), **names)
        return other

    @property
    def reads(self) -> list[str]:
        """The tensors that it reads, without absent ones."""
        return [tensor for tensor in self.input if tensor]

    @functools.cached_property
    def producers(self) -> tuple[str, ...]:
        """The operators that it reads or must run behind."""
        return *(tensor.rpartition(":")[0] for tensor in self.reads), *self.after

    def find(self, slot: str) -> str:
        """The tensor that it takes as the named input; "" where it takes none."""
        return next((tensor for tensor, name in zip(self.input, self.slots, strict=True) if name == slot and tensor), "")

    def tensor(self, slot: str) -> str:
        """The tensor that it takes as the named input.

        Raises:
            LoweringError: it takes none.
        """
        if not (tensor := self.find(slot)):
            raise LoweringError(f"{self.name} ({self.type}) has no input {slot}; it has {', '.join(self.slots)}")
        return tensor

    def describe(self) -> str:
        """Inputs with their types, as in `x=i8[4,16], weight0=i8[2,16,32] NZ`."""
        return ", ".join(f"{name}={tensor}" for name, tensor in self.inputs.items()) or "no input"


LegalityRule = Callable[..., str | None]
"""rule(node, options, **parameters of the fact): what is wrong and what is legal, or None. `options` are those of the graph."""
