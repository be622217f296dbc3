"""Operators of a serialised GE graph for those who read it: parsed once, and told apart by kind.

A graph of a model has the operators of a layer once for each layer. What depends on an operator's attributes and descriptions alone is
worked out once for each kind of operator, which is its message without its name and the names of its inputs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from .ge_file import Canonical, messages, parse, serialised

T = TypeVar("T")


class Vertex(NamedTuple):
    """What an operator has that others of its kind have not; graphs that differ in sizes alone have the same.

    Attributes:
        input: names of the tensors that it reads; "" where an optional input is absent.
        producers: names of the operators that give these tensors, without absent ones.
        results: names of the tensors that it gives.
    """

    name: str
    type: str
    input: tuple[str, ...]
    producers: tuple[str, ...]
    results: tuple[str, ...]


class Operator:
    """An `OpDef` message that nobody changes.

    Attributes:
        vertex: its place in the graph, whose fields are the operator's as well.
        message: of its kind, without names; `attr`, `input_desc` and `output_desc` are its own.
        kind: equal for operators of one graph that differ in their name and the names of their inputs alone.
    """

    __slots__ = ("attr", "input", "input_desc", "kind", "message", "name", "output_desc", "producers", "results", "type", "vertex")

    def __init__(self, vertex: Vertex, message: Any, kind: int) -> None:
        self.vertex, self.message, self.kind = vertex, message, kind
        self.name, self.type, self.input, self.producers, self.results = vertex
        self.attr, self.input_desc, self.output_desc = message.attr, message.input_desc, message.output_desc


Graphs = tuple[tuple[str, tuple[Operator, ...]], ...]
last: dict[bytes, Graphs] = {}
"""The graphs of the last model, for its next reader."""


def graphs(model: bytes) -> Graphs:
    """Name and operators of each graph in a serialised `ModelDef`: the main graph, then those that it calls.

    Raises:
        LoweringError: the bytes are no GE model.
    """
    if model not in last:
        last.clear()
        last[model] = tuple((graph.name, _operators(graph.op)) for graph in parse(model).graph)
    return last[model]


def read(model: bytes) -> tuple[Operator, ...]:
    """Operators of the main graph in a serialised `ModelDef`, see `graphs`."""
    return graphs(model)[0][1]


def operators(ops: Iterable[Any]) -> tuple[Operator, ...]:
    """`OpDef` messages of one graph, in order."""
    return _operators(map(copy.copy, ops))


def _operators(ops: Iterable[Any]) -> tuple[Operator, ...]:
    """Messages that nobody else reads: what is left of the first of a kind is the kind's."""
    kinds, givers, read_ops = dict[bytes, tuple[Any, int]](), dict[str, tuple[str, str]](), []
    for message in ops:
        name, op_type = message.name, message.type
        # A tensor is named by all its readers; each name is held once.
        given = [givers.get(tensor) or (tensor, tensor.rpartition(":")[0]) for tensor in message.input]
        message.ClearField("name")
        message.ClearField("input")
        kind = kinds.setdefault(message.SerializeToString(deterministic=True), (message, len(kinds)))
        results = tuple([f"{name}:{port}" for port in range(len(kind[0].output_desc))])
        givers.update([(tensor, (tensor, name)) for tensor in results])
        inputs, producers = tuple([tensor for tensor, _ in given]), tuple([giver for tensor, giver in given if tensor])
        read_ops.append(Operator(Vertex(name, op_type, inputs, producers, results), *kind))
    return tuple(read_ops)


def opened(model: bytes) -> tuple[Any, list[tuple[tuple[Vertex, ...], list[Any]]]]:
    """A `ModelDef` without operators, and the vertices of each graph with the messages of their kinds, one for all of a kind."""
    rest = parse(model)
    for graph in rest.graph:
        graph.ClearField("op")
    return rest, [(tuple(op.vertex for op in ops), [op.message for op in ops]) for _, ops in graphs(model)]


def closed(rest: Any, parts: Sequence[tuple[tuple[Vertex, ...], Sequence[Any]]]) -> Canonical:
    """The inverse of `opened`, after which `graphs` has the operators that were written."""
    model, written = copy.deepcopy(rest), []
    for graph, (vertices, kinds) in zip(model.graph, parts, strict=True):
        known, ops = dict[int, tuple[int, bytes]](), list[Operator]()
        for vertex, names, message in zip(vertices, _names(vertices), kinds, strict=True):
            number, described = known.get(id(message)) or known.setdefault(id(message), (len(known), message.SerializeToString()))
            graph.op.add().MergeFromString(names + described)
            ops.append(Operator(vertex, message, number))
        written.append((graph.name, tuple(ops)))
    last.clear()
    last[data := serialised(model)] = tuple(written)
    return data


@functools.lru_cache(maxsize=2)
def _names(vertices: tuple[Vertex, ...]) -> list[bytes]:
    """The part of each message that is not its kind's."""
    return [messages().OpDef(name=vertex.name, input=vertex.input).SerializeToString() for vertex in vertices]


def by_structure(function: Callable[..., T]) -> Callable[..., T]:
    """A function of operators that reads their vertices alone, and of what can be hashed: called once for graphs that have the same."""
    known = functools.lru_cache(maxsize=2)(function)
    return lambda ops, *others: known(tuple([op.vertex for op in ops]), *others)


def by_kind(describe: Callable[[Any], T]) -> Callable[[Any], T]:
    """`describe`, called once for each kind of operator of one graph. It must not read an operator's name, or its inputs' names."""
    known: dict[int, T] = {}

    def described(op: Operator) -> T:
        if op.kind not in known:
            known[op.kind] = describe(op)
        return known[op.kind]

    return described
