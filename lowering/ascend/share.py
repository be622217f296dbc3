"""Computes once in a step what several calls of bodies compute alike: slots, angles, masks and lengths that all layers read.

Each node of each call gets a number; nodes of equal numbers have equal values. What two calls compute alike moves out of their bodies, in
front of the first call that finds its operands there; the bodies take the value as an operand instead. Where an earlier call computes it
of values of its own, that call returns it. So does what a call computes of the step alone, without weights and other layers, even where no
other call does: a layer then has the same operators however many there are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.node import map_aggregate

from ...graphs.invariants import results_of
from ...graphs.ir.alias import owner
from ...graphs.ir.flatten import bodies, inlined
from ...graphs.ir.outline import outline
from ...graphs.primitive import nbytes
from ...graphs.types import Signature
from .bodies import is_operand, is_plain, recorded, taking
from .operators.table import COMMUNICATING_TARGETS

# Operators that become no kernel of the device.
_FREE = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "detach")

LARGE_CONSTANT_BYTES = 2**16
"""A constant that is larger is held once too; smaller ones stay in the bodies, where GE's fusions see them."""


def share(graph: GraphModule, signature: Signature, runs: Collection[str]) -> GraphModule:
    """The graph with what its calls compute alike computed once.

    No call computes more than before: each value that moves leaves every body that computed it.

    Args:
        graph: calls of lowered bodies (lowered.py); its operands are `signature.operands`.
        runs: names of bodies that are runs of nodes between the calls of the model (outline.py). They are made anew.
    """
    root = torch.nn.Module()
    for name, body in bodies(graph).items():
        setattr(root, name, _merged(body))
    single = inlined(_make_graph_module(root, graph.graph), runs)
    numbers = _Numbers(single, signature)
    places = numbers.places()
    moved = {name: _moved(single, name, numbers, places) for name in bodies(single)}
    returned = _returned(numbers, moved)
    first = {name: _return(body, returned[name]) for name, body in bodies(single).items()}
    rest = {name: taking(body, moved[name].values, moved[name].nodes) for name, body in bodies(single).items()}
    shared = outline(_Rebuilding(numbers, moved, rest, {name: (first[name], returned[name]) for name in first}).run(single))
    for name, body in bodies(shared).items():
        if name not in moved:
            operands = [node.meta["val"] for node in body.graph.nodes if node.op == "placeholder"]
            setattr(shared, name, recorded(_with_contiguous_results(body), operands))
    return shared


def _with_contiguous_results(body: GraphModule) -> GraphModule:
    """The body that hands over values as the bodies that read them were recorded; in GE such a copy is no operator (converters.py)."""
    output = body.graph.output_node()
    with body.graph.inserting_before(output):
        results = [
            node if node.meta["val"].is_contiguous() else body.graph.call_function(torch.ops.aten.contiguous.default, (node,))
            for node in results_of(body)
        ]
    output.args = (tuple(results),)
    body.recompile()
    return body


@dataclass(frozen=True)
class _Moved:
    """What leaves a body.

    Attributes:
        nodes: all nodes that leave it.
        values: those that the rest reads, in order.
    """

    nodes: frozenset[Node]
    values: tuple[Node, ...]


def _is_pure(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("npu", "air"):
        return not target._schema.is_mutable and str(target) not in COMMUNICATING_TARGETS
    return is_plain(node)


def _is_free(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _FREE


def _written(graph: GraphModule) -> set[Node]:
    """Nodes whose memory an operator of the graph writes in place, or leaves undefined."""
    written = set()
    for node in graph.graph.nodes:
        if str(node.target) == "npu.npu_grouped_matmul.default" and (rows := _destroyed(node)) is not None:
            written.add(owner(rows))
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for given, declared in zip(node.args, node.target._schema.arguments, strict=False):
                if isinstance(given, Node) and declared.alias_info is not None and declared.alias_info.is_write:
                    written.add(owner(given))
    return written


def _destroyed(product: Node) -> Node | None:
    """The int8 rows that a grouped product with int4 weights unpacks in their own memory; its schema does not say so."""
    rows, weight = product.args[0][0], product.args[1][0]  # type: ignore[index]
    int4 = isinstance(weight, Node) and weight.meta["val"].dtype == torch.int32
    return rows if int4 and isinstance(rows, Node) and rows.meta["val"].dtype == torch.int8 else None


def _computation(node: Node) -> tuple[Hashable, tuple[Node, ...]]:
    """What a node computes, but for its inputs; and those, in the order of its arguments. Equal constants of two types differ."""
    inputs: list[Node] = []

    def part(argument: Any) -> Any:
        if not isinstance(argument, Node):
            return type(argument).__name__, str(argument)
        inputs.append(argument)
        return "input"

    args, kwargs = map_aggregate(node.args, part), map_aggregate({name: node.kwargs[name] for name in sorted(node.kwargs)}, part)
    return (node.target, repr(args), repr(kwargs)), tuple(inputs)


def _merged(body: GraphModule) -> GraphModule:
    """The body with nodes that compute the same of the same nodes merged."""
    written, first = _written(body), dict[Hashable, Node]()
    for node in list(body.graph.nodes):
        if node.op != "call_function" or not _is_pure(node) or owner(node) in written:
            continue
        # What reads memory that is written in place depends on when it reads.
        if any(owner(source) in written for source in node.all_input_nodes):
            continue
        same = first.setdefault(_computation(node), node)
        if same is not node:
            node.replace_all_uses_with(same)
            body.graph.erase_node(node)
    body.recompile()
    return body


@dataclass(frozen=True)
class _Template:
    """What a node computes in every call of its body.

    Attributes:
        computation, inputs: of `_computation`.
        owner, owners: the nodes that allocated its memory, and that of its inputs.
    """

    computation: Hashable
    inputs: tuple[Node, ...]
    owner: Node
    owners: frozenset[Node]


def _templates(graph: GraphModule, pools: Collection[Node] = ()) -> dict[Node, _Template | None]:
    """By node, in order; None where a value may differ each time: the node reads or writes memory that changes, or exchanges data."""
    changing, templates = _written(graph) | set(pools), dict[Node, _Template | None]()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            template = _Template(*_computation(node), owner(node), frozenset(map(owner, node.all_input_nodes)))
            plain = _is_pure(node) and template.owner not in changing and changing.isdisjoint(template.owners)
            templates[node] = template if plain else None
    return templates


class _Numbers:
    """Numbers of the values of a graph of calls: equal numbers, equal values.

    Attributes:
        of_main: number of each node of the main graph; of a call none.
        of_call: numbers of the nodes of each call's body.
        given: the nodes of the main graph that each call passes, by operand of its body.
    """

    def __init__(self, graph: GraphModule, signature: Signature) -> None:
        self.of_main: dict[Node, int] = {}
        self.of_call: dict[Node, dict[Node, int]] = {}
        self.given: dict[Node, dict[Node, Node]] = {}
        self._known: dict[Hashable, int] = {}
        self._constant: set[int] = set()
        self._opaque: set[int] = set()
        self._of_step: set[int] = set()
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        params, pools = set(placeholders[: len(signature.params)]), set(placeholders[len(signature.params) :][: len(signature.state)])
        templates = {name: _templates(body) for name, body in bodies(graph).items()}
        main = _templates(graph, pools)
        for node in graph.graph.nodes:
            if node.op == "call_module":
                self._call(node, graph.get_submodule(str(node.target)), templates[str(node.target)], pools)
            elif node.op == "placeholder":
                self.of_main[node] = self._new()
                if node not in params:
                    self._of_step.add(self.of_main[node])
            elif node.target is operator.getitem and node.args[0] in self.of_call:
                call: Any = node.args[0]
                results = results_of(graph.get_submodule(str(call.target)))  # type: ignore[arg-type]
                self.of_main[node] = self.of_call[call][results[int(str(node.args[1]))]]
            elif node.op == "call_function":
                self.of_main[node] = number = self._number(main[node], self.of_main)
                # What is read of a pool in front of all layers is known of the step as well.
                if self._of_step.union(self._constant).issuperset(self.of_main[source] for source in node.all_input_nodes):
                    self._of_step.add(number)

    def is_of_step(self, number: int) -> bool:
        """Whether a value depends on inputs of the step, and on no weight and no layer."""
        return number in self._of_step and number not in self._constant

    def is_constant(self, number: int) -> bool:
        """Whether a value depends on no operand."""
        return number in self._constant

    def is_opaque(self, number: int) -> bool:
        """Whether a node computes a value that may differ each time: it reads or writes memory that changes, or exchanges data."""
        return number in self._opaque

    def places(self) -> dict[int, set[Node | None]]:
        """The calls that compute each value; None stands for the main graph."""
        places: dict[int, set[Node | None]] = defaultdict(set)
        for call, values in self.of_call.items():
            for node, number in values.items():
                if node.op == "call_function":
                    places[number].add(call)
        for node, number in self.of_main.items():
            if node.op == "call_function" and not (node.target is operator.getitem and node.args[0] in self.of_call):
                places[number].add(None)
        return places

    def _new(self) -> int:
        number = len(self._known)
        self._known[("new", number)] = number
        return number

    def _call(self, call: Node, body: Any, templates: Mapping[Node, _Template | None], pools: set[Node]) -> None:
        operands = (node for node in body.graph.nodes if node.op == "placeholder")
        self.given[call] = dict(zip(operands, call.args, strict=True))  # type: ignore[arg-type]
        changing = {inner for inner, outer in self.given[call].items() if outer in pools}
        numbers = self.of_call[call] = {inner: self.of_main[outer] for inner, outer in self.given[call].items()}
        for node, template in templates.items():
            reads = template is not None and (template.owner in changing or not changing.isdisjoint(template.owners))
            numbers[node] = self._number(None if reads else template, numbers)

    def _number(self, template: _Template | None, numbers: Mapping[Node, int]) -> int:
        if template is None:
            self._opaque.add(number := self._new())
            return number
        inputs = tuple(numbers[source] for source in template.inputs)
        number = self._known.setdefault((template.computation, inputs), len(self._known))
        if self._constant.issuperset(inputs):
            self._constant.add(number)
        elif self._of_step.union(self._constant).issuperset(inputs):
            self._of_step.add(number)
        return number


def _costs(node: Node, numbers: _Numbers, number: int) -> bool:
    """Whether a step pays for a value: by a kernel, or by memory for a large constant."""
    if numbers.is_constant(number):
        return is_operand(node.meta["val"]) and nbytes(node.meta["val"]) > LARGE_CONSTANT_BYTES
    return not _is_free(node)


def _moved(graph: GraphModule, name: str, numbers: _Numbers, places: Mapping[int, Collection[Node | None]]) -> _Moved:
    """What calls of a body compute as other calls or the main graph do, or of the step alone; of operands alone."""
    calls = [call for call in numbers.of_call if call.target == name]
    nodes = list(graph.get_submodule(name).graph.nodes)  # type: ignore[union-attr, arg-type]
    derivable = {node for node in nodes if node.op == "placeholder"}
    moved: set[Node] = set()
    for node in nodes:
        own = [numbers.of_call[call][node] for call in calls] if node.op == "call_function" else []
        if not own or not derivable.issuperset(node.all_input_nodes) or any(map(numbers.is_opaque, own)):
            continue
        derivable.add(node)
        alone = all(numbers.is_of_step(number) or numbers.is_constant(number) for number in own)
        if _costs(node, numbers, own[0]) and (alone or any(len(places[number]) > 1 for number in own)):
            moved.add(node)
    # What moved nodes are computed of is computed with them; what costs nothing stays where others read it too.
    needed = set(moved)
    for node in reversed(nodes):
        if node in derivable and node.op == "call_function" and not needed.isdisjoint(node.users):
            needed.add(node)
            if _costs(node, numbers, numbers.of_call[calls[0]][node]) or moved.issuperset(node.users):
                moved.add(node)
    while stuck := {node for node in moved if not moved.issuperset(node.users) and not is_operand(node.meta["val"])}:
        moved -= stuck
    values = tuple(node for node in nodes if node in moved and not moved.issuperset(node.users))
    return _Moved(frozenset(moved), values)


def _returned(numbers: _Numbers, moved: Mapping[str, _Moved]) -> dict[str, list[Node]]:
    """By body, values that stay in it and that a later call is given, which else would be computed again between the calls."""
    last = {numbers.of_call[call][node]: i for i, call in enumerate(numbers.of_call) for node in moved[str(call.target)].values}
    returned: dict[str, list[Node]] = {name: [] for name in moved}
    for i, (call, values) in enumerate(numbers.of_call.items()):
        name = str(call.target)
        for node, number in values.items():
            own = node.op == "call_function" and node not in moved[name].nodes and is_operand(node.meta["val"])
            if own and last.get(number, -1) > i and node not in returned[name]:
                returned[name].append(node)
    return returned


def _return(body: GraphModule, nodes: Sequence[Node]) -> int:
    """Makes a body return more of its values; returns the place of the first among its results."""
    results = results_of(body)
    body.graph.output_node().args = ((*results, *nodes),)
    return len(results)


class _Rebuilding:
    """The main graph under construction: calls of the bodies that are left, and between them what has moved out.

    Args:
        moved: what leaves each body.
        rest: by name, the body that is left and the positions of the operands that it reads (`taking`).
        returned: by name, what a body returns beside its results, and the place of the first of these.
    """

    def __init__(
        self,
        numbers: _Numbers,
        moved: Mapping[str, _Moved],
        rest: Mapping[str, tuple[GraphModule, list[int]]],
        returned: Mapping[str, tuple[int, Sequence[Node]]],
    ) -> None:
        self._numbers, self._moved, self._rest, self._returned = numbers, moved, rest, returned
        self._graph = Graph()
        self._values: dict[Node, Node] = {}
        self._computed: dict[int, Node] = {}
        self._given = {numbers.of_call[call][node] for call in numbers.of_call for node in moved[str(call.target)].values}
        self._pending = [(call, node, self._leaves(call, node)) for call in numbers.of_call for node in moved[str(call.target)].values]

    def run(self, graph: GraphModule) -> GraphModule:
        """The new main graph; nodes between calls are not yet bodies."""
        for node in graph.graph.nodes:
            if node.op == "output":
                self._graph.output(tuple(self._values[result] for result in node.args[0]))
            elif node.op == "call_module":
                self._compute_what_can_be()
                self._values[node] = self._call(node)
            else:
                number = self._numbers.of_main[node]
                self._values[node] = self._computed.get(number) or self._copied(node, self._values.__getitem__)
                self._computed[number] = self._values[node]
        root = torch.nn.Module()
        for name, (body, _) in self._rest.items():
            setattr(root, name, body)
        return _make_graph_module(root, self._graph)

    def _call(self, node: Node) -> Node:
        name = str(node.target)
        kept = [self._values[node.args[position]] for position in self._rest[name][1]]  # type: ignore[index]
        call = self._graph.call_module(name, (*kept, *(self._value(node, inner) for inner in self._moved[name].values)))
        call.meta = dict(node.meta)
        first, others = self._returned[name]
        for place, inner in enumerate(others, start=first):
            number = self._numbers.of_call[node][inner]
            if number in self._given and number not in self._computed:
                self._computed[number] = value = self._graph.call_function(operator.getitem, (call, place))
                value.meta["val"] = inner.meta["val"]
        return call

    def _compute_what_can_be(self) -> None:
        """As early as possible: what follows from the inputs of a step comes before its first layer, in one body."""
        for call, node, leaves in self._pending:
            if leaves <= self._values.keys():
                self._value(call, node)
        self._pending = [each for each in self._pending if not each[2] <= self._values.keys()]

    def _value(self, call: Node, node: Node) -> Node:
        if node.op == "placeholder":
            return self._values[self._numbers.given[call][node]]
        number = self._numbers.of_call[call][node]
        if number not in self._computed:
            sources = {source: self._value(call, source) for source in node.all_input_nodes}
            self._computed[number] = self._copied(node, sources.__getitem__)
        return self._computed[number]

    def _leaves(self, call: Node, node: Node) -> set[Node]:
        if node.op == "placeholder":
            return {self._numbers.given[call][node]}
        return set[Node]().union(*(self._leaves(call, source) for source in node.all_input_nodes))

    def _copied(self, node: Node, sources: Any) -> Node:
        copy = self._graph.node_copy(node, sources)
        copy.meta = dict(node.meta)
        return copy
