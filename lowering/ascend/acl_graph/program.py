"""A file of torch operators, resolved for one rank: what each segment runs, and which values it hands on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from ....graphs.errors import LoweringError
from ....graphs.invariants import results_of
from ..operators.table import GROUP_ARGUMENTS, HCCL_NAMED, HOST_LISTS, RANK_ARGUMENTS
from .file import AclFile, graph_of
from .host_lists import lists_of
from .second_stream import FETCH, Order, beside, on_host, order

Find = Callable[[str], Callable[..., Any]]
"""Name of an operator, as the file has it -> what runs it."""


@dataclass(frozen=True)
class TorchCall:
    """One operator of a rank.

    Attributes:
        number: of its node, under which its value is kept.
        name: of the operator, as in the file.
        target: what runs it.
        args, kwargs: with a `Value` in place of each node.
        frees: numbers of values that nobody reads afterwards.
        takes_lists: whether the host gives it lists.
        launches: whether it runs on a stream.
        beside: whether on the second one.
        waits: number of the launch of the other stream that it waits for; -1 for none.
        awaited: whether a launch of the other stream waits for it.
    """

    number: int
    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    frees: tuple[int, ...]
    takes_lists: bool
    launches: bool = True
    beside: bool = False
    waits: int = -1
    awaited: bool = False


class Value(int):
    """Number of the node whose value an argument is."""


@dataclass(frozen=True)
class GraphSegment:
    """A part of a graph between two reads of the host.

    Attributes:
        calls: in order.
        keeps: numbers of the values that later segments, the host or the results read.
        lists: numbers of the values that its operators take as lists.
        fetched: numbers of the values that the host reads behind it.
    """

    calls: tuple[TorchCall, ...]
    keeps: tuple[int, ...]
    lists: tuple[int, ...]
    fetched: tuple[int, ...]

    @property
    def updated(self) -> int:
        """Number of operators whose lists the host gives before each run."""
        return sum(call.takes_lists for call in self.calls)

    @property
    def streams(self) -> int:
        """How many it runs on."""
        return 1 + any(call.beside for call in self.calls)


class AclProgram:
    """The operators of one rank.

    Args:
        acl_file: of all ranks.
        find: resolves operators.
        rank: number among all ranks, which is that in the group of the expert exchange.
        groups: name of the communicator by symbol.
        device: where operators that take a device create their result.

    Attributes:
        vals: abstract value of each node (meta tensors), by number.
        leaves: name of each operand, "" where it has none.

    Raises:
        LoweringError: an operator is not known, or communicates over a group that there is none of.
    """

    def __init__(self, acl_file: AclFile, find: Find, rank: int, groups: Mapping[str, str], device: torch.device) -> None:
        self.file, self._find, self._rank, self._groups, self._device = acl_file, find, rank, groups, device
        graph = graph_of(acl_file)
        self.nodes = [node for node in graph.graph.nodes if node.op != "output"]
        self._numbers = {node: Value(i) for i, node in enumerate(self.nodes)}
        self.vals = [node.meta["val"] for node in self.nodes]
        self.leaves = [str(node.meta.get("leaf", "")) for node in self.nodes[: acl_file.operands]]
        self.results = tuple(self._numbers[node] for node in results_of(graph))
        self.reads = frozenset(i for i, node in enumerate(self.nodes[: acl_file.operands]) if node.users)
        self.segments = self._segments(graph)

    def _segments(self, graph: GraphModule) -> tuple[GraphSegment, ...]:
        last = {source: node for node in graph.graph.nodes for source in node.all_input_nodes}
        second = beside(self.file, self.nodes)
        borders = [self.file.operands, *self.file.cuts, len(self.nodes)]
        segments, fetched = [], set[Node]()
        for start, stop in itertools.pairwise(borders):
            # On one stream the next operators would wait for what fetches.
            part = [node for node in self.nodes[start:stop] if second or str(node.target) != FETCH]
            here = {value for node in part for value in lists_of(node).values()}
            wanted = {value for node in self.nodes[stop:] for value in lists_of(node).values()}
            ready = [value for value in wanted - fetched if self._numbers[value] < stop]
            fetched |= set(ready)
            inside = {node: last.get(node, node) for node in part if self._numbers.get(last.get(node, node), len(self.nodes)) < stop}
            keeps = [self._numbers[node] for node in part if node not in inside]
            ordered = order(part, second, inside)
            awaited = set(ordered.waits.values())
            calls = tuple(self._call(node, ordered, node in second, node in awaited) for node in part)
            segments.append(GraphSegment(calls, tuple(keeps), tuple(sorted(map(self._at, here))), tuple(sorted(map(self._at, ready)))))
        return tuple(segments)

    def _at(self, node: Node) -> int:
        return int(self._numbers[node])

    def _call(self, node: Node, ordered: Order, second: bool, awaited: bool) -> TorchCall:
        dead, waits = tuple(map(self._at, ordered.frees.get(node, ()))), ordered.waits.get(node)
        name, args, kwargs = str(node.target), self._bound(node.args), self._bound(dict(node.kwargs))
        if name in GROUP_ARGUMENTS:
            args, kwargs = self._in_group(node, name, args, kwargs)
        return TorchCall(
            self._at(node), name, self._find(name), args, kwargs, dead, name in HOST_LISTS,
            not on_host(node), second, -1 if waits is None else self._at(waits), awaited,
        )  # fmt: skip

    def _bound(self, arguments: Any) -> Any:
        def value(argument: Any) -> Any:
            if isinstance(argument, Node):
                return self._numbers[argument]
            return self._device if isinstance(argument, torch.device) else argument

        return map_aggregate(arguments, value)

    def _in_group(self, node: Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        position, argument = GROUP_ARGUMENTS[name]
        symbol = args[position] if len(args) > position else kwargs[argument]
        if symbol not in self._groups:
            known = ", ".join(sorted(self._groups)) or "no group"
            raise LoweringError(f"{node.name} ({name}) is for group {symbol!r}, and this rank has {known}")
        # torch registers groups under their symbols (runtime/distributed/process_groups.py); CANN's kernels want HCCL's own name.
        group = self._groups[symbol] if name in HCCL_NAMED else symbol
        values = dict(enumerate(args))
        if position in values:
            values[position] = group
        else:
            kwargs = {**kwargs, argument: group}
        if name in RANK_ARGUMENTS:
            values[RANK_ARGUMENTS[name]] = self._rank
        return tuple(values.values()), kwargs


def run(calls: Sequence[TorchCall], values: list[Any]) -> None:
    """Runs operators over `values`, by number of the node; dead ones become None."""
    for call in calls:
        values[call.number] = call.target(*filled(call.args, values), **filled(call.kwargs, values))
        for number in call.frees:
            values[number] = None


def filled(arguments: Any, values: Sequence[Any]) -> Any:
    """Arguments with values in place of their numbers."""
    kind = type(arguments)
    if kind is Value:
        return values[arguments]
    if isinstance(arguments, tuple):
        return tuple([filled(argument, values) for argument in arguments])
    if isinstance(arguments, list):
        return [filled(argument, values) for argument in arguments]
    if isinstance(arguments, dict):
        return {name: filled(argument, values) for name, argument in arguments.items()}
    return arguments
