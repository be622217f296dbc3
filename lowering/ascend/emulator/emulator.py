"""Emulates a mesh: runs one lowered graph on all ranks in this process, node by node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from ....graphs import ops as ops
from ....graphs import ordering
from ....graphs.errors import LoweringError
from ....graphs.primitive import NAMESPACE, Primitive, of_target
from ....graphs.types import Mesh
from ..ge_file import GROUPS
from ..operators.table import GROUP_KERNELS, KERNELS, group_of

Values = list[dict[Node, Any]]
"""Values of each rank, by node."""

_PLAIN = ("aten", NAMESPACE, ordering.NAMESPACE)


class RankEmulator:
    """Runs a graph on CPU tensors for every rank of a mesh. All ranks run a node before any runs the next; a collective is one call
    over the values of its group.

    The graph may call bodies (`call_module`); its nodes are aten operators, primitives, overloads of `operators.table.FORMS`, and
    functional collectives over the groups of the mesh.

    Args:
        graph: the graph that all ranks share; tensors it creates on a device are created on the CPU.
        mesh: of all ranks.
    """

    def __init__(self, graph: GraphModule, mesh: Mesh) -> None:
        self._graph = graph
        self._groups = mesh.groups(GROUPS)
        self._size = mesh.size

    def __call__(self, operands_per_rank: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Runs one step. State is updated in the operands of each rank; ranks must not share a tensor that the graph writes.

        Args:
            operands_per_rank: for each rank the operands, in the order of the graph's placeholders.

        Returns:
            for each rank the graph's results.

        Raises:
            LoweringError: when the number of ranks or operands is wrong, an operator has no CPU kernel, or the members of a group bring
                tensors of different shapes or dtypes to a collective.
        """
        if len(operands_per_rank) != self._size:
            raise LoweringError(f"operands of {len(operands_per_rank)} ranks, the mesh has {self._size}")
        with torch.no_grad():
            return [list(results) for results in self._run(self._graph, [list(operands) for operands in operands_per_rank])]

    def _run(self, graph: GraphModule, operands: list[list[Any]]) -> list[tuple[Any, ...]]:
        nodes = list(graph.graph.nodes)
        dead = _last_uses(nodes)
        values: Values = [{} for _ in operands]
        placeholders = [n for n in nodes if n.op == "placeholder"]
        for rank, of_rank in enumerate(operands):
            if len(of_rank) != len(placeholders):
                raise LoweringError(f"rank {rank} has {len(of_rank)} operands, the graph takes {len(placeholders)}")
            values[rank].update(zip(placeholders, of_rank, strict=True))
        for node in nodes:
            if node.op == "output":
                return [tuple(of_rank[n] for n in node.args[0]) for of_rank in values]
            if node.op != "placeholder":
                _store(values, node, self._step(graph, node, [_call(node, of_rank) for of_rank in values]), dead[node])
        raise LoweringError("the graph has no output")

    def _step(self, graph: GraphModule, node: Node, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Sequence[Any]:
        if node.op == "call_module":
            return self._run(graph.get_submodule(str(node.target)), [list(args) for args, _ in calls])  # type: ignore[arg-type]
        if node.op != "call_function":
            raise LoweringError(f"{node.name} is a {node.op} of {node.target!r}; everything a graph reads must be an operand")
        collective = _collective(node)
        if collective is None:
            kernel = _kernel(node)
            return [kernel(*args, **kwargs) for args, kwargs in calls]
        name, rule = collective
        if name not in self._groups:
            raise LoweringError(f"{node.name} communicates over group {name!r}; this mesh has {sorted(self._groups)}")
        results: dict[int, Any] = {}
        for ranks in self._groups[name]:
            members = [calls[rank] for rank in ranks]
            _check_agreement(node, ranks, members)
            results.update(zip(ranks, rule(members), strict=True))
        return [results[rank] for rank in range(self._size)]


def _store(values: Values, node: Node, results: Sequence[Any], dead: list[Node]) -> None:
    for of_rank, result in zip(values, results, strict=True):
        of_rank[node] = result
        for unused in dead:
            del of_rank[unused]


def _last_uses(nodes: list[Node]) -> dict[Node, list[Node]]:
    """The nodes whose values nobody reads after each node; a node without readers is among its own."""
    last = {source: node for node in nodes for source in node.all_input_nodes}
    dead: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        if node.op != "output" and last.get(node, node).op != "output":
            dead[last.get(node, node)].append(node)
    return dead


def _call(node: Node, values: Mapping[Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one rank's call: its values in place of nodes, the CPU in place of devices."""

    def value(argument: Any) -> Any:
        if isinstance(argument, Node):
            return values[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    return map_aggregate(node.args, value), dict(map_aggregate(node.kwargs, value))


def _kernel(node: Node) -> Callable[..., Any]:
    """The function that runs a node on one rank.

    Raises:
        LoweringError: when there is none, naming those that there are.
    """
    target, name = node.target, str(node.target)
    if target is operator.getitem:
        return operator.getitem
    if name.startswith("_c10d_functional.wait_tensor"):
        return _identity
    if name in KERNELS:
        return KERNELS[name]
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _PLAIN:
        return target
    kernels = ", ".join(sorted([*KERNELS, *GROUP_KERNELS]))
    raise LoweringError(f"{node.name} calls {name}, which has no CPU kernel; besides {', '.join(_PLAIN)} there are {kernels}")


def _identity(value: torch.Tensor) -> torch.Tensor:
    return value


def _collective(node: Node) -> tuple[str, Callable[[list[Any]], list[Any]]] | None:
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
        LoweringError: naming the ranks and the tensors of each.
    """
    first = list(_avals(members[0]))
    for rank, member in zip(ranks[1:], members[1:], strict=True):
        if (other := list(_avals(member))) != first:
            raise LoweringError(f"{node.name} ({node.target}): rank {ranks[0]} brings {first}, rank {rank} {other}; legal is the same")


def _avals(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[tuple[int, ...], str]]:
    for value in (*call[0], *call[1].values()):
        if isinstance(value, torch.Tensor):
            yield tuple(value.shape), str(value.dtype)
