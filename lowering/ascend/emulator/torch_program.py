"""Graphs of torch operators as programs: with bodies or flat, of primitives or of NPU operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from ....graphs import ops as ops
from ....graphs import ordering
from ....graphs.errors import LoweringError
from ....graphs.primitive import NAMESPACE, Primitive, of_target
from ...artifact import graph_io
from ..acl_graph.program import Value, filled
from ..operators.record import Arguments
from ..operators.table import BY_TARGET, FORMS, GROUP_KERNELS, KERNELS, group_of
from .program import EmulatedProgram, Exchange, Step, Values, set_last_uses

_PLAIN = ("aten", NAMESPACE, ordering.NAMESPACE)
_NAMED = ("aten.", "operator.")
_WAIT = "_c10d_functional.wait_tensor.default"


class TorchStep(Step):
    """An operator of torch.

    Args:
        node: of the graph.
        number: of its value.
        kernel: runs it on one rank, or on all members where it has a group.
        arguments: with a `Value` in place of each tensor.
    """

    def __init__(self, node: Node, number: int, kernel: Callable[..., Any], arguments: Arguments, group: str = "") -> None:
        self.node, self.group = node, group
        form = FORMS.get(str(node.target)) if group else None
        if form is not None:
            self.exchange = BY_TARGET[form.name].exchange
            self.members, self.rank = (None if at is None else arguments[0][at] for at in (form.size, form.rank))
        self.label: str = f"{node.name} ({node.target})"
        self.number, self._kernel, self._arguments = number, kernel, arguments
        self.inputs, self.outputs = tuple(map(int, collected(arguments, Value))), (number,)

    def call(self, values: Values) -> Arguments:
        """Its arguments."""
        args, kwargs = self._arguments
        return filled(args, values), filled(kwargs, values)

    def run(self, call: Arguments) -> Any:
        """Calls the kernel."""
        return self._kernel(*call[0], **call[1])

    def run_group(self, calls: list[Arguments], wanted: Sequence[int] | None = None) -> Sequence[Any]:
        """Calls the kernel of all members."""
        results: Sequence[Any] = self._kernel(calls) if wanted is None else self._kernel(calls, wanted)
        return results

    def tensors(self, call: Arguments) -> list[torch.Tensor]:
        """The tensors among its arguments."""
        return collected(call, torch.Tensor)

    def of_member(self, call: Arguments, tensors: Sequence[torch.Tensor]) -> Arguments:
        """These arguments, with a member's tensors in place of this one's, in order."""
        theirs = iter(tensors)
        args, kwargs = map_aggregate((call[0], dict(call[1])), lambda own: next(theirs) if isinstance(own, torch.Tensor) else own)
        return args, kwargs

    def store(self, call: Arguments, results: Any, values: Values) -> None:
        """Keeps its result, which may be several."""
        values[self.number] = results


class TorchProgram(EmulatedProgram):
    """A graph of torch operators; calls of bodies are inlined. Devices are the CPU.

    Its nodes are aten operators, primitives, NPU operators that have CPU kernels, and collectives.

    Raises:
        LoweringError: an operator has no CPU kernel, or the graph reads something that is no operand.
    """

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.operands = self._count = len(graph.graph.find_nodes(op="placeholder"))
        self._results = self._inlined(graph, [Value(i) for i in range(self.operands)])
        set_last_uses(self.steps, self._results)

    def run(self, operands_per_rank: Sequence[Sequence[torch.Tensor]], exchange: Exchange) -> list[list[torch.Tensor]]:
        """Runs one step, which writes state in the operands of each rank.

        Args:
            operands_per_rank: in the order of the placeholders.

        Returns:
            for each rank the results, which may lie in the memory of an operand.
        """
        ranks = [[*operands, *[None] * (self._count - self.operands)] for operands in operands_per_rank]
        self.run_steps(ranks, exchange)
        return [[values[number] for number in self._results] for values in ranks]

    def _inlined(self, graph: GraphModule, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Adds the operators of a body that is called with these operands; returns its results."""
        bound: dict[Node, Any] = {}
        remaining = iter(operands)
        for node in graph.graph.nodes:
            args, kwargs = map_aggregate((node.args, node.kwargs), lambda argument: _bound(argument, bound))
            if node.op == "placeholder":
                bound[node] = next(remaining)
            elif node.op == "output":
                results: tuple[Any, ...] = tuple(args[0])
                return results
            elif node.op == "call_module":
                module: Any = graph.get_submodule(str(node.target))
                bound[node] = self._inlined(module, args)
            elif node.op != "call_function":
                raise LoweringError(f"{node.name} is a {node.op} of {node.target!r}; everything a graph reads must be an operand")
            elif node.target is operator.getitem and isinstance(args[0], tuple):
                bound[node] = args[0][args[1]]
            else:
                bound[node] = Value(self._count)
                self._count += 1
                self.steps.append(_step(node, bound[node], (args, dict(kwargs))))
        raise LoweringError("the graph has no output")


def kernel_of(target: Any) -> Callable[..., Any]:
    """The function that runs an operator on one rank, or on all members of a group.

    Args:
        target: of a node: an overload, or an operator that only has a name.

    Raises:
        LoweringError: there is none, naming those that there are.
    """
    name = str(target)
    kernel: Callable[..., Any] | None = KERNELS.get(name) or GROUP_KERNELS.get(name)
    if kernel is not None:
        return kernel
    if name == _WAIT:
        return _identity
    if isinstance(target, graph_io.NamedOperator) and name.startswith(_NAMED):
        return graph_io.find_target(name)
    if target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.namespace in _PLAIN):
        return target
    kernels = ", ".join(sorted([*KERNELS, *GROUP_KERNELS]))
    raise LoweringError(f"{name} has no CPU kernel; besides {', '.join(_PLAIN)} there are {kernels}")


def _step(node: Node, number: int, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> TorchStep:
    target, primitive = str(node.target), of_target(node.target)
    if primitive is not None and primitive.has("group_reference"):
        names = [argument.name for argument in primitive.op._schema.arguments]
        group = str(_positional(names, arguments)[names.index("group")])
        return TorchStep(node, number, _of_primitive(primitive, names), arguments, group)
    group = group_of(target, *arguments) if target in GROUP_KERNELS else ""
    return TorchStep(node, number, kernel_of(node.target), arguments, group)


def _of_primitive(primitive: Primitive[Any], names: list[str]) -> Callable[[list[Arguments]], list[Any]]:
    def rule(calls: list[Arguments]) -> list[Any]:
        return list(primitive.rule("group_reference")([_positional(names, arguments) for arguments in calls]))

    return rule


def _positional(names: list[str], arguments: Arguments) -> tuple[Any, ...]:
    args, kwargs = arguments
    return (*args, *(kwargs[name] for name in names[len(args) :]))


def _bound(argument: Any, bound: Mapping[Node, Any]) -> Any:
    if isinstance(argument, Node):
        return bound[argument]
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def collected(arguments: Arguments, kind: type) -> list[Any]:
    """The values of a type among arguments, in order."""
    collected: list[Any] = []
    map_aggregate((arguments[0], dict(arguments[1])), lambda value: collected.append(value) if isinstance(value, kind) else None)
    return collected


def _identity(value: torch.Tensor) -> torch.Tensor:
    return value
