"""Turns one lowered graph and a mesh into a run of all its ranks in this process, node by node in lockstep."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from ....graphs import ops as ops
from ....graphs.errors import LoweringError
from ....graphs.primitive import NAMESPACE, Primitive, of_target
from ....graphs.types import Mesh
from .npu_reference import GROUP_KERNELS, KERNELS, group_of

Values = list[dict[Node, Any]]
"""What each rank knows, by node."""

_PLAIN = ("aten", NAMESPACE)


class RankEmulator:
    """Runs a graph on CPU tensors for every rank of a mesh: a collective is one call over the values of its group.

    The graph may call bodies (`call_module`); its nodes are aten operators, primitives, the operators of `npu_reference`, and
    functional collectives over the groups of the mesh.

    Args:
        graph: the graph that all ranks share; tensors it creates on a device are created on the CPU.
        mesh: of all ranks.
    """

    def __init__(self, graph: GraphModule, mesh: Mesh) -> None:
        self._graph = graph
        self._groups = mesh.groups()
        self._size = mesh.size

    def __call__(self, operands_per_rank: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Runs one step: operands in the order of the graph's placeholders, state is updated in the rank's own operand.

        Ranks must not share a tensor that the graph writes.

        Returns:
            for each rank the graph's results.

        Raises:
            LoweringError: when ranks or operands are of another number, an operator has no CPU kernel, or the members of a group
                disagree about a collective.
        """
        if len(operands_per_rank) != self._size:
            raise LoweringError(f"operands of {len(operands_per_rank)} ranks, the mesh has {self._size}")
        with torch.no_grad():
            return [list(results) for results in self._run(self._graph, [list(operands) for operands in operands_per_rank])]

    def _run(self, graph: GraphModule, operands: list[list[Any]]) -> list[tuple[Any, ...]]:
        nodes = list(graph.graph.nodes)
        dead = _last_uses(nodes)
        values: Values = [{} for _ in operands]
        places = [n for n in nodes if n.op == "placeholder"]
        for rank, given in enumerate(operands):
            if len(given) != len(places):
                raise LoweringError(f"rank {rank} has {len(given)} operands, the graph takes {len(places)}")
            values[rank].update(zip(places, given, strict=True))
        for node in nodes:
            if node.op == "output":
                return [tuple(known[n] for n in node.args[0]) for known in values]
            if node.op != "placeholder":
                _keep(values, node, self._step(graph, node, [_call(node, known) for known in values]), dead[node])
        raise LoweringError("the graph has no output")

    def _step(self, graph: GraphModule, node: Node, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Sequence[Any]:
        if node.op == "call_module":
            return self._run(graph.get_submodule(str(node.target)), [list(args) for args, _ in calls])  # type: ignore[arg-type]
        if node.op != "call_function":
            raise LoweringError(f"{node.name} is a {node.op} of {node.target!r}; everything a graph reads must be an operand")
        together = _together(node)
        if together is None:
            kernel = _kernel(node)
            return [kernel(*args, **kwargs) for args, kwargs in calls]
        name, rule = together
        if name not in self._groups:
            raise LoweringError(f"{node.name} talks over group {name!r}; this mesh has {sorted(self._groups)}")
        results: dict[int, Any] = {}
        for ranks in self._groups[name]:
            members = [calls[rank] for rank in ranks]
            _check_agreement(node, ranks, members)
            results.update(zip(ranks, rule(members), strict=True))
        return [results[rank] for rank in range(self._size)]


def _keep(values: Values, node: Node, results: Sequence[Any], dead: list[Node]) -> None:
    for known, result in zip(values, results, strict=True):
        known[node] = result
        for gone in dead:
            del known[gone]


def _last_uses(nodes: list[Node]) -> dict[Node, list[Node]]:
    """The nodes whose values are dead after each node; one that nobody reads dies where it is made."""
    last = {source: node for node in nodes for source in node.all_input_nodes}
    dead: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        if node.op != "output" and last.get(node, node).op != "output":
            dead[last.get(node, node)].append(node)
    return dead


def _call(node: Node, known: Mapping[Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one rank, with its values for nodes and the CPU for devices."""

    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return known[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    return map_aggregate(node.args, value), dict(map_aggregate(node.kwargs, value))


def _kernel(node: Node) -> Callable[..., Any]:
    """What one rank calls for a node.

    Raises:
        LoweringError: when there is nothing to call, naming what there is.
    """
    target, name = node.target, str(node.target)
    if target is operator.getitem:
        return operator.getitem
    if name.startswith("_c10d_functional.wait_tensor"):
        return _itself
    if name in KERNELS:
        return KERNELS[name]
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _PLAIN:
        return target
    there = sorted([*KERNELS, *GROUP_KERNELS])
    raise LoweringError(f"{node.name} calls {name}, which has no CPU kernel; besides {' and '.join(_PLAIN)} there are {', '.join(there)}")


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _together(node: Node) -> tuple[str, Callable[[list[Any]], list[Any]]] | None:
    """Group name and rule of a node that communicates, or None."""
    if (name := str(node.target)) in GROUP_KERNELS:
        return group_of(name, node.args, node.kwargs), GROUP_KERNELS[name]
    primitive = of_target(node.target)
    if primitive is None or not primitive.has("group_reference"):
        return None
    names = [argument.name for argument in primitive.op._schema.arguments]
    return str(_positional(names, node.args, node.kwargs)[names.index("group")]), _of_primitive(primitive, names)


def _of_primitive(primitive: Primitive[Any], names: list[str]) -> Callable[[list[Any]], list[Any]]:
    def rule(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        return list(primitive.rule("group_reference")([_positional(names, args, kwargs) for args, kwargs in calls]))

    return rule


def _positional(names: list[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*args, *(kwargs[name] for name in names[len(args) :]))


def _check_agreement(node: Node, ranks: Sequence[int], members: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Refuses members whose tensors differ in shape or dtype.

    Raises:
        LoweringError: naming the ranks and what each brings.
    """
    first = list(_avals(members[0]))
    for rank, member in zip(ranks[1:], members[1:], strict=True):
        if (here := list(_avals(member))) != first:
            raise LoweringError(f"{node.name} ({node.target}): rank {ranks[0]} brings {first}, rank {rank} {here}; legal is the same")


def _avals(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[tuple[int, ...], str]]:
    for value in (*call[0], *call[1].values()):
        if isinstance(value, torch.Tensor):
            yield tuple(value.shape), str(value.dtype)
