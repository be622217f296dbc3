"""Moves what reads parameters alone out of the bodies of a lowered graph, into one graph that is run when weights are loaded.

Operators that read constants alone stay where they are: GE computes those when it compiles (its ConstantFoldingPass; gitcode.com/cann/ge,
docs/en/design/features/constant_folding.md), and sees lengths and shapes that are constant. A parameter is no constant to GE: it is an
input of the graph, so what only depends on parameters would be computed in every step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.node import map_aggregate

from ...graphs.errors import LoweringError
from ...graphs.invariants import results_of
from ...graphs.ir.flatten import bodies
from ...graphs.primitive import nbytes
from ...graphs.types import Signature
from .bodies import is_operand, is_plain, taking
from .fold import FOLDED, expression
from .inspect_weights import LARGE_BYTES

_CONTIGUOUS = torch.ops.aten.clone.default


@dataclass(frozen=True)
class _Body:
    """A body, seen by all its calls.

    Attributes:
        calls: call nodes of the main graph.
        params: placeholders that are parameters in every call, by position.
        derivable: nodes that depend on parameters and constants alone, in order; those of constants alone are not among them.
        hoisted: tensors of `derivable` that another node or the result reads: they become operands.
    """

    module: GraphModule
    calls: tuple[Node, ...]
    params: Mapping[Node, int]
    derivable: frozenset[Node]
    hoisted: tuple[Node, ...]

    def names(self, call: Node) -> dict[Node, str]:
        """Names of the parameters that a call passes."""
        return {node: str(call.args[position].meta["leaf"]) for node, position in self.params.items()}  # type: ignore[union-attr]


def hoist(graph: GraphModule, signature: Signature) -> GraphModule:
    """The graph with a first call, of body `FOLDED`, that computes derived values from parameters, and bodies that take these.

    A derived value larger than `LARGE_BYTES` stays in the body unless it replaces its parameters: nobody else reads them, and with other
    large values that are derived from them it is not larger than they are together. Otherwise both would be held.

    Args:
        graph: calls of bodies of `npu` and `aten` operators (lowered.py), one operand a leaf of `signature.operands`.

    Raises:
        LoweringError: the graph has a body of that name.
    """
    if FOLDED in bodies(graph):
        raise LoweringError(f"a body is called {FOLDED!r}, which is the name of the one that derives values from parameters")
    params = [node for node in graph.graph.nodes if node.op == "placeholder"][: len(signature.params)]
    stays: set[Node] = set()
    while True:
        parts = {name: _body(graph, name, set(params), stays) for name in bodies(graph)}
        if not (larger := _costs_memory(graph, parts.values())):
            break
        stays |= larger
    return _hoisted(graph, params, parts) if any(part.hoisted for part in parts.values()) else graph


def _body(graph: GraphModule, name: str, params: set[Node], stays: set[Node]) -> _Body:
    module: Any = graph.get_submodule(name)
    calls = tuple(node for node in graph.graph.nodes if node.op == "call_module" and node.target == name)
    operands = [node for node in module.graph.nodes if node.op == "placeholder"]
    own = {node: i for i, node in enumerate(operands) if all(call.args[i] in params for call in calls)}
    derivable, constant = set[Node](), set[Node]()
    for node in module.graph.nodes:
        if node.op != "call_function" or node in stays or not is_plain(node):
            continue
        if all(source in constant for source in node.all_input_nodes):
            constant.add(node)
        elif all(source in own or source in constant or source in derivable for source in node.all_input_nodes):
            derivable.add(node)
    hoisted = tuple(node for node in module.graph.nodes if node in derivable and any(user not in derivable for user in node.users))
    if several := [node for node in hoisted if not is_operand(node.meta["val"])]:
        return _body(graph, name, params, stays | set(several))
    return _Body(module, calls, own, frozenset(derivable), hoisted)


def _costs_memory(graph: GraphModule, parts: Iterable[_Body]) -> set[Node]:
    """The large derived values that would be held beside the parameters that they are computed from."""
    values: dict[str, tuple[Node, set[Node]]] = {}
    taken = {node for node in results_of(graph) if node.op == "placeholder"}
    places: dict[str, set[Node]] = {}
    for part in parts:
        read = [node for node in part.module.graph.nodes if node.op == "placeholder" and not part.derivable.issuperset(node.users)]
        operands = [node for node in part.module.graph.nodes if node.op == "placeholder"]
        taken |= {call.args[operands.index(node)] for call in part.calls for node in read}  # type: ignore[misc]
        for call in part.calls:
            names = part.names(call)
            for node in part.hoisted:
                text = expression(node, names)
                values[text] = node, {call.args[part.params[source]] for source in _sources(node, part)}  # type: ignore[misc]
                places.setdefault(text, set()).add(node)
    large = {text: sources for text, (node, sources) in values.items() if nbytes(node.meta["val"]) > LARGE_BYTES}
    refused: set[Node] = set()
    for text, sources in large.items():
        beside = [other for other, others in large.items() if sources & others]
        held = sum(nbytes(values[other][0].meta["val"]) for other in beside)
        apart = any(large[other] != sources for other in beside)
        if apart or sources & taken or held > nbytes(*(source.meta["val"] for source in sources)):
            refused |= places[text]
    return refused


def _sources(node: Node, part: _Body) -> set[Node]:
    sources = {source for source in node.all_input_nodes if source in part.params}
    return sources.union(*(_sources(source, part) for source in node.all_input_nodes if source in part.derivable))


def _hoisted(graph: GraphModule, params: Sequence[Node], parts: Mapping[str, _Body]) -> GraphModule:
    folding = _Folding(params)
    results = {call: [folding.value(node, part, call) for node in part.hoisted] for part in parts.values() for call in part.calls}
    calls, values, root = Graph(), dict[Node, Node](), torch.nn.Module()
    setattr(root, FOLDED, folding.done())
    rest = {name: taking(part.module, part.hoisted, part.derivable) for name, part in parts.items()}
    for name, (module, _) in rest.items():
        setattr(root, name, module)
    derived: list[Node] = []
    for node in graph.graph.nodes:
        if node.op == "output":
            calls.output(tuple(values[result] for result in node.args[0]))
            continue
        if node.op != "placeholder" and not derived:
            derived = folding.call(calls, values)
        values[node] = calls.node_copy(node, values.__getitem__)
        values[node].meta = dict(node.meta)
        if node.op == "call_module":
            kept = [values[node.args[position]] for position in rest[str(node.target)][1]]
            values[node].args = (*kept, *(derived[i] for i in results[node]))
    return _make_graph_module(root, calls)


class _Folding:
    """The graph of derived values under construction; equal expressions are one node."""

    def __init__(self, params: Sequence[Node]) -> None:
        self._order = {param: i for i, param in enumerate(params)}
        self._values: list[tuple[str, Node, dict[Node, Node]]] = []
        self._numbers: dict[str, int] = {}

    def value(self, node: Node, part: _Body, call: Node) -> int:
        """Number of the derived value that a body's node is in a call."""
        text = expression(node, part.names(call))
        if text not in self._numbers:
            self._numbers[text] = len(self._values)
            self._values.append((text, node, {source: call.args[at] for source, at in part.params.items()}))  # type: ignore[misc]
        return self._numbers[text]

    def done(self) -> GraphModule:
        """The flat graph: parameters in the order of the program -> derived values, contiguous."""
        used = {given[source] for _, node, given in self._values for source in _ancestors(node) if source in given}
        self.params = sorted(used, key=self._order.__getitem__)
        graph, known = Graph(), dict[str, Node]()
        for param in self.params:
            known[str(param.meta["leaf"])] = graph.placeholder(f"param_{len(known)}")
            known[str(param.meta["leaf"])].meta = dict(param.meta)
        results = [self._copy(graph, known, node, given) for _, node, given in self._values]
        self._results = [_contiguous(graph, node) for node in results]
        graph.output(tuple(self._results))
        return _make_graph_module(torch.nn.Module(), graph)

    def call(self, graph: Graph, values: Mapping[Node, Node]) -> list[Node]:
        """Adds the call to a main graph; returns the nodes of the derived values, each named after its first parameter."""
        call = graph.call_module(FOLDED, tuple(values[param] for param in self.params))
        call.meta["val"] = tuple(node.meta["val"] for node in self._results)
        derived, names = [], set[str]()
        for i, (_, node, given) in enumerate(self._values):
            first = min((given[source] for source in _ancestors(node) if source in given), key=self._order.__getitem__)
            name = f"{first.meta['leaf']}.{FOLDED}"
            name = next(n for n in (name, *(f"{name}_{k}" for k in range(2, len(names) + 3))) if n not in names)
            names.add(name)
            derived.append(graph.call_function(operator.getitem, (call, i)))
            derived[-1].meta = {"val": call.meta["val"][i], "leaf": name}
        return derived

    def _copy(self, graph: Graph, known: dict[str, Node], node: Node, given: Mapping[Node, Node]) -> Node:
        text = expression(node, {source: str(param.meta["leaf"]) for source, param in given.items()})
        if text not in known:
            sources = {source: self._copy(graph, known, source, given) for source in node.all_input_nodes}
            copy = graph.call_function(node.target, _on_cpu(node.args, sources), _on_cpu(node.kwargs, sources))  # type: ignore[arg-type]
            copy.meta["val"] = node.meta["val"]
            known[text] = copy
        return known[text]


def _ancestors(node: Node) -> set[Node]:
    return {node}.union(*(_ancestors(source) for source in node.all_input_nodes))


def _on_cpu(arguments: Any, sources: Mapping[Node, Node]) -> Any:
    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return sources[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    return map_aggregate(arguments, value)


def _contiguous(graph: Graph, node: Node) -> Node:
    if node.meta["val"].is_contiguous():
        return node
    copy = graph.call_function(_CONTIGUOUS, (node,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta")
    return copy
