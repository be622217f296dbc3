"""The operators of a captured graph, described as those of a GE graph are: what the rules of work read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Node

from ....graphs.errors import LoweringError
from ...platform import Platform
from ..acl_graph.file import AclFile, graph_of
from ..acl_graph.inspect_acl import launches
from ..legality.table import FORM, table
from ..legality.torch_nodes import slots, type_of
from ..legality.torch_operators import arguments, torch_operators
from ..operators.table import GROUP_ARGUMENTS
from ..operators.tensor_type import TensorType

_WAIT = "_c10d_functional.wait_tensor.default"


@dataclass(frozen=True)
class Described:
    """An operand or a result by its name in the table of legality."""

    name: str


@dataclass(frozen=True)
class Operator:
    """One launch.

    Attributes:
        name: of the body that it is in, a slash, and its own.
        type: what runs it, by `TorchOperator.runs`.
        input: names of the tensors that it reads, "producer:result".
        input_desc: of each of them.
        output_desc: of each result; none of an operator that returns what it writes.
        attr: attributes by their names in the table, as messages of GE have them.
    """

    name: str
    type: str
    input: tuple[str, ...]
    input_desc: tuple[Described, ...]
    output_desc: tuple[Described, ...]
    attr: Mapping[str, Any]


@dataclass
class Captured:
    """A graph.

    Attributes:
        operators: launches in order.
        types: type of each tensor.
        resident: tensors that lie in HBM: operands and views of them.
        pools: those of `resident` that the graph writes.
    """

    operators: list[Operator] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    resident: frozenset[str] = frozenset()
    pools: frozenset[str] = frozenset()


def read(acl_file: AclFile, platform: Platform) -> Captured:
    """The launches of a graph for all ranks.

    Raises:
        LoweringError: nothing is known of an operator.
    """
    nodes = list(graph_of(acl_file).graph.nodes)
    started, bodies = set(launches(nodes)), _bodies(acl_file)
    graph, tensors = Captured(), dict[Node, str]()
    resident, pools, operands = set[str](), set[str](), 0
    for node in nodes:
        if node.op == "output":
            continue
        name = node.name
        if node.op == "call_function":
            body = next(bodies)
            name = f"{body}/{node.name}" if body else node.name
        tensors[node] = _tensor(node, name, tensors)
        for tensor, value in _results(node, name, tensors[node]):
            graph.types.setdefault(tensor, type_of(value))
        if node.op == "placeholder":
            resident.add(tensors[node])
            pools.update([tensors[node]] if operands in acl_file.written else ())
            operands += 1
        elif node not in started:
            base = tensors[node.all_input_nodes[0]] if node.all_input_nodes else ""
            for group in (resident, pools):
                group.update(tensor for tensor, _ in _results(node, name, tensors[node]) if base in group)
        else:
            graph.operators.append(_operator(node, name, tensors, platform))
    graph.resident, graph.pools = frozenset(resident), frozenset(pools)
    return graph


def _tensor(node: Node, name: str, tensors: Mapping[Node, str]) -> str:
    """The tensor that a node stands for: of several results the first; `getitem` is one of them, and waiting gives what was waited for."""
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if source is not None and "getitem" in str(node.target):
        return f"{tensors[source].rpartition(':')[0]}:{node.args[1]}"
    if source is not None and str(node.target) == _WAIT:
        return tensors[source]
    return f"{name}:0"


def _results(node: Node, name: str, tensor: str) -> Iterator[tuple[str, torch.Tensor]]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield tensor, value
    elif isinstance(value, list | tuple):
        yield from ((f"{name}:{port}", each) for port, each in enumerate(value) if isinstance(each, torch.Tensor))


def _operator(node: Node, name: str, tensors: Mapping[Node, str], platform: Platform) -> Operator:
    target = str(node.target)
    row = torch_operators().get(target)
    if row is None:
        raise LoweringError(f"{name} ({target}): nothing is known of this operator; legal are those of the table of legality")
    facts = table().facts(row.runs, platform.chip, platform.cann, platform.packages)
    form = next((fact for fact in reversed(facts) if fact.what == FORM), None)
    declared = arguments(target, row.schema)
    given = {argument.name: argument.default for argument in declared if argument.default is not None}
    given |= {argument.name: value for argument, value in zip(declared, node.args, strict=False)} | dict(node.kwargs)
    inputs = [
        (slot, tensors[element])
        for argument, known in row.inputs.items()
        for slot, element in slots(known, given.get(argument), form is not None and form.inputs.get(known) == "dynamic")
        if isinstance(element, Node)
    ]
    attributes = {known: _value(given[argument]) for argument, known in row.attributes.items() if given.get(argument) is not None}
    if target in GROUP_ARGUMENTS:
        position, argument = GROUP_ARGUMENTS[target]
        group = _value(node.args[position] if position < len(node.args) else node.kwargs[argument])
        attributes |= {"group": group, "group_ep": group}
    written = _returns_what_it_writes(node)
    outputs = () if written else tuple(Described(f"{port}") for port, _ in enumerate(_results(node, name, f"{name}:0")))
    return Operator(
        name, row.runs, tuple(tensor for _, tensor in inputs), tuple(Described(slot) for slot, _ in inputs), outputs, attributes
    )


def _returns_what_it_writes(node: Node) -> bool:
    """Whether a result is an operand that the operator writes in place: its name in the schema ends in an underscore."""
    return str(node.target).split(".")[-2].endswith("_")


def _value(value: Any) -> SimpleNamespace:
    """An attribute as a message of GE has it."""
    listed = SimpleNamespace(i=list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [])
    plain = int(value) if isinstance(value, bool | int) else 0
    return SimpleNamespace(i=plain, b=bool(plain), s=value.encode() if isinstance(value, str) else b"", list=listed)


def _bodies(acl_file: AclFile) -> Iterator[str]:
    for body, nodes in acl_file.calls:
        yield from [body] * nodes
