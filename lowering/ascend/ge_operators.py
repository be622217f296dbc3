"""Operators of a serialised GE graph for those who read it: parsed once, and told apart by kind.

A graph of a model has the operators of a layer once for each layer. What depends on an operator's attributes and descriptions alone is
worked out once for each kind of operator, which is its message without its name and the names of its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .ge_file import messages, parse

T = TypeVar("T")


class Operator:
    """An `OpDef` message that nobody changes.

    Attributes:
        message: the message; `attr`, `input_desc` and `output_desc` are its own.
        name, type: of the message.
        input: names of the tensors that it reads; "" where an optional input is absent.
        producers: names of the operators that give these tensors, without absent ones.
        kind: equal for operators of one graph that differ in their name and the names of their inputs alone.
    """

    __slots__ = ("input", "kind", "message", "name", "producers", "type")

    def __init__(self, message: Any, kind: int, strings: dict[str, str]) -> None:
        # A tensor is named by all its readers; each name is held once.
        self.message, self.kind = message, kind
        self.name: str = strings.setdefault(name := message.name, name)
        self.type: str = strings.setdefault(kind_of := message.type, kind_of)
        self.input: tuple[str, ...] = tuple([strings.setdefault(tensor, tensor) for tensor in message.input])
        names = [tensor.rpartition(":")[0] for tensor in self.input if tensor]
        self.producers = tuple([strings.setdefault(name, name) for name in names])

    @property
    def attr(self) -> Any:
        return self.message.attr

    @property
    def input_desc(self) -> Any:
        return self.message.input_desc

    @property
    def output_desc(self) -> Any:
        return self.message.output_desc


@functools.lru_cache(maxsize=1)
def graphs(model: bytes) -> tuple[tuple[str, tuple[Operator, ...]], ...]:
    """Name and operators of each graph in a serialised `ModelDef`: the main graph, then those that it calls.

    Those of the last model are kept for the next reader, until `graphs.cache_clear()`.

    Raises:
        LoweringError: the bytes are no GE model.
    """
    return tuple((graph.name, operators(graph.op)) for graph in parse(model).graph)


def read(model: bytes) -> tuple[Operator, ...]:
    """Operators of the main graph in a serialised `ModelDef`, see `graphs`."""
    return graphs(model)[0][1]


def operators(ops: Iterable[Any]) -> tuple[Operator, ...]:
    """`OpDef` messages of one graph, in order."""
    kinds, strings = dict[bytes, int](), dict[str, str]()
    empty, read_ops = messages().OpDef, []
    for message in ops:
        # A new message each time: one that is used again keeps the memory of all that was copied into it.
        anonymous = empty()
        anonymous.CopyFrom(message)
        anonymous.ClearField("name")
        anonymous.ClearField("input")
        read_ops.append(Operator(message, kinds.setdefault(anonymous.SerializeToString(deterministic=True), len(kinds)), strings))
    return tuple(read_ops)


def by_kind(describe: Callable[[Any], T]) -> Callable[[Any], T]:
    """`describe`, called once for each kind of operator of one graph. It must not read an operator's name, or its inputs' names."""
    known: dict[int, T] = {}

    def described(op: Operator) -> T:
        if op.kind not in known:
            known[op.kind] = describe(op)
        return known[op.kind]

    return described
