"""The operators of a graph for GE, or of a captured graph, as nodes: what legality and costs read."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node as FxNode

from ....graphs.errors import LoweringError
from ....graphs.ir.alias import is_view
from ....graphs.types import DTYPE_NAMES
from ...artifact import graph_io
from ...platform import Platform
from ..acl_graph.file import AclFile, graph_of
from ..acl_graph.formats import in_nz
from ..acl_graph.second_stream import STREAM as BESIDE
from ..acl_graph.second_stream import beside
from ..ge_file import PRIORITY, STREAM, GeFile
from ..ge_operators import Operator, by_kind, read
from ..ge_types import tensor_types
from ..launches import launches
from ..operators.node import Node
from ..operators.table import GROUP_ARGUMENTS, HOST_LISTS, group_of
from ..operators.tensor_type import ND, NZ, TensorType
from .table import FORM, Table, table
from .torch_operators import TorchOperator, arguments, torch_operators

OPERAND = "Data"
"""Type of the nodes that are the graph's operands."""
STRUCTURE = frozenset({OPERAND, "Const", "NetOutput", ""})
"""Types of operands, constants, results and views of memory: nothing runs for them."""
PRIVATE = frozenset(
    {
        *("_input_name_key", "_input_name_value", "_output_name_key", "_output_name_value", "_inputs_all_sym", "_readable_value"),
        *("_is_unfed_optional", STREAM, PRIORITY, "_super_kernel_scope", "_super_kernel_options"),
        *("_op_aicore_num", "_op_vectorcore_num", "_op_exec_never_timeout", "_enable_inner_parallel", "_fx_tensor_name"),
        "_inference_rule",  # of operators that torchair converts by `ge.custom_op`
    }
)
"""Attributes that torchair and GE know of every operator (torchair of torch_npu 2.13.0: scope/_scope_attr.py, _ge_concrete_graph)."""
_WAIT = "_c10d_functional.wait_tensor.default"
_INT4_IN_INT32 = 8
_BLANK = Node("", "")


@dataclass(frozen=True)
class Nodes:
    """The operators of a graph.

    Attributes:
        nodes: in order, operands and views among them.
        types: type of each tensor.
        started: those that start a kernel in each step.
    """

    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    started: Sequence[Node]


@functools.singledispatch
def nodes_of(graph: GeFile | AclFile, platform: Platform, facts: Table | None = None) -> Nodes:
    """The operators of a graph for all ranks.

    Args:
        platform: that it is for.
        facts: the table; by default the one of this package.

    Raises:
        LoweringError: a GE graph is no model, or types of its tensors do not follow from it; a torch operator is registered nowhere, or
            has a tensor of a dtype that no NPU operator takes.
    """
    raise TypeError(f"{type(graph).__name__} is no graph for NPUs")


@nodes_of.register
def _of_ge_file(graph: GeFile, platform: Platform, facts: Table | None = None) -> Nodes:
    types = tensor_types(graph)
    nodes = of_ge(read(graph.graph), types, graph.data)
    # GE computes once what depends on constants alone.
    return Nodes(nodes, types, launches(nodes))


@nodes_of.register
def _of_captured(graph: AclFile, platform: Platform, facts: Table | None = None) -> Nodes:
    captured = _Captured(graph, platform, facts or table())
    nodes = tuple(captured.nodes())
    return Nodes(nodes, captured.types, [node for node in nodes if node.type not in STRUCTURE])


def of_ge(ops: Sequence[Operator], types: Mapping[str, TensorType], operands: Sequence[int]) -> tuple[Node, ...]:
    """The operators of a GE graph.

    Args:
        types: of all tensors, by name.
        operands: number of the operand of each `Data`.
    """
    described, nodes, known = by_kind(_described), list[Node](), dict[tuple[int, ...], Node]()
    constant, constant_tensors, told = set[str](), set[str](), {**types, "": None}
    for op in ops:
        if op.type == OPERAND:
            told_of = {desc.name: types[tensor] for desc, tensor in zip(op.output_desc, op.results, strict=True)}
            operand = operands[op.attr["index"].i]
            nodes.append(_BLANK.copy(name=op.name, type=OPERAND, outputs=told_of, results=len(told_of), operand=operand, producers=()))
            continue
        slots, outputs, attributes, private, group, stream = described(op)
        tensors, after = op.input, tuple[str, ...]()
        if len(tensors) > len(slots):
            # Control inputs come behind those that are described.
            after = tuple([tensor.rpartition(":")[0] for tensor in tensors[len(slots) :]])
            tensors = tensors[: len(slots)]
        fixed = () if constant_tensors.isdisjoint(tensors) else [tensor in constant_tensors for tensor in tensors]
        # Equal types are one object nearly always, and a place is compared in a tenth of the time.
        kind = op.kind, *map(id, map(told.__getitem__, tensors)), *map(id, map(types.get, op.results)), *fixed
        if (first := known.get(kind)) is not None:
            nodes.append(first.copy(key=first.key, name=op.name, input=tensors, after=after, producers=op.producers))
        else:
            named = [(slot, tensor) for slot, tensor in zip(slots, tensors, strict=True) if tensor]
            results = zip(outputs, map(types.get, op.results), strict=True)
            known[kind] = Node(
                name=op.name,
                type=op.type,
                inputs={slot: types[tensor] for slot, tensor in named},
                constants=frozenset(slot for slot, tensor in named if tensor in constant_tensors),
                outputs={name: result for name, result in results if result is not None},
                attributes=attributes,
                private=private,
                input=tensors,
                slots=slots,
                after=after,
                results=len(outputs),
                group=group,
                stream=stream,
            )
            nodes.append(known[kind])
        if op.type == "Const" or (op.producers and op.type not in STRUCTURE and constant.issuperset(op.producers)):
            constant.add(op.name)
            constant_tensors.update(op.results)
    return tuple(nodes)


def _described(op: Operator) -> tuple[tuple[str, ...], tuple[str, ...], Mapping[str, Any], frozenset[str], str, str]:
    """What operators of a kind have in common: names of inputs and outputs, attributes, private ones, group, stream."""
    attr = op.attr
    names = list(attr)
    attributes = {name: value_of(attr[name]) for name in names if not name.startswith("_")}
    private = frozenset(name for name in names if name.startswith("_") and name not in PRIVATE)
    stream = attr[STREAM].s.decode() if STREAM in attr else ""
    slots, outputs = (tuple(desc.name for desc in descs) for descs in (op.input_desc, op.output_desc))
    group = attributes.get("group") or attributes.get("group_ep")
    return slots, outputs, attributes, private, str(group or ""), stream


def value_of(attribute: Any) -> Any:
    """Value of an AttrDef message: a number, a truth value, a string, or a tuple of them; None for a tensor or a graph."""
    kind = attribute.WhichOneof("value")
    if kind in ("i", "f", "b", "dt"):
        return getattr(attribute, kind)
    if kind == "s":
        return attribute.s.decode(errors="replace")
    if kind == "list":
        items = attribute.list
        return tuple(items.i) or tuple(items.f) or tuple(items.b) or tuple(text.decode(errors="replace") for text in items.s)
    return None


class _Captured:
    """Reads a captured graph.

    Attributes:
        types: type of each tensor; those that hold int4 are as they lie in memory.
    """

    def __init__(self, acl_file: AclFile, platform: Platform, facts: Table) -> None:
        self.types: dict[str, TensorType] = {}
        self._file, self._platform, self._facts = acl_file, platform, facts
        self._nz, self._second = in_nz(acl_file), beside(acl_file, list(graph_of(acl_file).graph.nodes))
        self._tensors: dict[FxNode, str] = {}

    def nodes(self) -> Iterator[Node]:
        """The operators in order; `getitem` and waits for a collective are none."""
        bodies, operands = self._file.bodies, 0
        for fx in graph_of(self._file).graph.nodes:
            if fx.op == "placeholder":
                yield Node(self._named(fx, fx.name, f"{fx.name}:0"), OPERAND, operand=operands)
                operands += 1
            elif fx.op == "call_function":
                body, target = next(bodies), str(fx.target)
                name, source = f"{body}/{fx.name}" if body else fx.name, fx.all_input_nodes[0] if fx.all_input_nodes else None
                if source is not None and target.endswith("getitem"):
                    self._tensors[fx] = f"{self._tensors[source].rpartition(':')[0]}:{fx.args[1]}"
                elif source is not None and target == _WAIT:
                    self._tensors[fx] = self._tensors[source]
                else:
                    self._named(fx, name, f"{name}:0")
                    yield self._node(fx, name, torch_operators().get(target))

    def _named(self, fx: FxNode, name: str, tensor: str) -> str:
        self._tensors[fx] = tensor
        for port, value in enumerate(_results(fx)):
            if isinstance(value, torch.Tensor):
                self.types.setdefault(f"{name}:{port}", type_of(value))
        return name

    def _node(self, fx: FxNode, name: str, row: TorchOperator | None) -> Node:
        target, results = str(fx.target), _results(fx)
        first = tuple(self._tensors[source] for source in fx.all_input_nodes[:1])
        if row is None or not row.runs:
            views = row is not None or (target.startswith("aten.") and is_view(graph_io.find_target(target)))
            return Node(name, "" if views else target, input=first, slots=("",) * len(first), results=len(results))
        facts = self._facts.facts(row.runs, self._platform.chip, self._platform.cann, self._platform.packages)
        form = next((fact for fact in reversed(facts) if fact.what == FORM), None)
        declared = arguments(target, row.schema)
        given = {argument.name: argument.default for argument in declared if argument.default is not None}
        given |= {argument.name: value for argument, value in zip(declared, fx.args, strict=False)} | dict(fx.kwargs)
        operands = [
            (argument, slot, element)
            for argument, known in row.inputs.items()
            for slot, element in slots(known, given.get(argument), form is not None and form.inputs.get(known) == "dynamic")
        ]
        tensors = [(slot, element) for _, slot, element in operands if isinstance(element, FxNode)]
        lists, kinds = HOST_LISTS.get(target, ()), form.outputs if form else {}
        named = [f"{output}0" if kinds.get(output) == "dynamic" else output for output in row.outputs]
        return Node(
            name=name,
            type=row.runs,
            inputs={slot: type_of(element, packed=argument in row.packed, nz=element in self._nz) for argument, slot, element in operands},
            constants=frozenset(slot for argument, slot, element in operands if argument in lists or not isinstance(element, FxNode)),
            outputs={output: type_of(value) for output, value in zip(named, results, strict=False) if isinstance(value, torch.Tensor)},
            attributes={known: _plain(given[argument]) for argument, known in row.attributes.items() if given.get(argument) is not None},
            called=target,
            unnamed=frozenset(_unnamed(row, given, {argument.name: argument.default for argument in declared})),
            strided=frozenset(
                slot
                for argument, slot, element in operands
                if isinstance(element, FxNode) and argument not in lists and not element.meta["val"].is_contiguous()
            ),
            input=tuple(self._tensors[element] for _, element in tensors),
            slots=tuple(slot for slot, _ in tensors),
            # An operator whose name in the schema ends in an underscore returns what it writes.
            results=0 if target.split(".")[-2].endswith("_") else len(results),
            group=group_of(target, fx.args, fx.kwargs) if target in GROUP_ARGUMENTS else "",
            stream=BESIDE if fx in self._second else "",
        )


def slots(name: str, value: Any, listed: bool) -> Iterator[tuple[str, Any]]:
    """Inputs that an argument gives, by their names in the table; numbers in place of a tensor are no inputs."""
    tensors = value if isinstance(value, list | tuple) and any(isinstance(element, FxNode) for element in value) else [value]
    for number, element in enumerate(tensors):
        if isinstance(element, FxNode | list | tuple):
            yield (f"{name}{number}" if listed else name), element


def type_of(value: Any, *, packed: bool = False, nz: bool = False) -> TensorType:
    """Type of a node's value, or of a list of integers, which the host hands over."""
    if isinstance(value, list | tuple):
        return TensorType("i64", (len(value),))
    tensor = value.meta["val"] if isinstance(value, FxNode) else value
    if tensor.dtype not in DTYPE_NAMES:
        raise LoweringError(f"{value} is {tensor.dtype}[{tuple(tensor.shape)}]; legal are {', '.join(DTYPE_NAMES.values())}")
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if packed and dtype == "i32":
        dtype, shape = "i4", (*shape[:-1], shape[-1] * _INT4_IN_INT32)
    return TensorType(dtype, shape, NZ if nz else ND)


def _results(fx: FxNode) -> Sequence[Any]:
    value = fx.meta["val"]
    return value if isinstance(value, list | tuple) else [value]


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _unnamed(row: TorchOperator, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    named = row.inputs.keys() | row.attributes.keys() | row.free
    for argument, value in given.items():
        if argument not in named and value is not None and value != defaults.get(argument):
            yield argument
