"""All NPU operators that graphs may have, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....graphs.errors import LoweringError
from . import (
    attention,
    collectives,
    dense,
    elementwise,
    exchange,
    experts,
    fused_experts,
    norms,
    of_packages,
    quant_sparse,
    routing,
    shapes,
    sparse,
    state,
)
from .call import Function, GroupFunction
from .node import Node
from .record import Converter, GroupKernel, Kernel, NpuOperator, TorchForm

_GROUPS = (
    *(attention, collectives, dense, elementwise, exchange, experts, fused_experts, norms, of_packages),
    *(quant_sparse, routing, shapes, sparse, state),
)
OPERATORS: tuple[NpuOperator, ...] = tuple(operator for group in _GROUPS for operator in group.OPERATORS)

BY_TYPE: Mapping[str, NpuOperator] = {kind: operator for operator in OPERATORS for kind in (*operator.ge, *operator.acl)}
BY_TARGET: Mapping[str, NpuOperator] = {form.name: operator for operator in OPERATORS for form in operator.torch}
FORMS: Mapping[str, TorchForm] = {form.name: form for operator in OPERATORS for form in operator.torch}

COMMUNICATING: Mapping[str, NpuOperator] = {kind: operator for operator in OPERATORS if operator.collective for kind in operator.ge}
"""Types of GE that exchange data between ranks. No other operator does; whoever asks reads this."""
COMMUNICATING_TARGETS: Mapping[str, NpuOperator] = {name: BY_TARGET[name] for name, form in FORMS.items() if form.group is not None}
"""Overloads of torch that do."""
GROUP_ARGUMENTS: Mapping[str, tuple[int, str]] = {name: form.group for name, form in FORMS.items() if form.group is not None}
"""Position and name of the group among the arguments of each of `COMMUNICATING_TARGETS`."""
RANK_ARGUMENTS: Mapping[str, int] = {name: form.rank for name, form in FORMS.items() if form.rank is not None}
"""Position of the rank's number in its group, of those that take it."""
HOST_LISTS: Mapping[str, tuple[str, ...]] = {name: form.host_lists for name, form in FORMS.items() if form.host_lists}
"""Overloads whose tiling the host computes from integers, and the arguments that hold these."""
HCCL_NAMED = frozenset(name for name in GROUP_ARGUMENTS if not name.startswith("_c10d_functional."))
"""Operators that take HCCL's own name of their group: torch's collectives take the symbol that the group is registered under."""
FUNCTIONS: Mapping[str, Function] = {kind: operator.run for kind, operator in BY_TYPE.items() if operator.run is not None}
"""Functions of GE operators of one rank, by type."""
GROUP_FUNCTIONS: Mapping[str, GroupFunction] = {
    kind: operator.run_group for kind, operator in BY_TYPE.items() if operator.run_group is not None
}
"""Functions of GE operators of all members of a group, by type."""
CONVERTERS: Mapping[str, Converter] = {name: each for operator in OPERATORS for name, each in operator.converters.items()}
"""Converters of overloads of torch, in place of torchair's."""
KERNELS: Mapping[str, Kernel] = {name: form.kernel for name, form in FORMS.items() if form.kernel is not None}
GROUP_KERNELS: Mapping[str, GroupKernel] = {name: form.group_kernel for name, form in FORMS.items() if form.group_kernel is not None}

WRITES: Mapping[str, Mapping[int, int]] = {kind: operator.writes for kind, operator in BY_TYPE.items() if operator.writes}
"""Result -> input whose memory it overwrites, by type of operator."""
IN_PLACE: Mapping[str, Mapping[int, int]] = {kind: writes for kind, writes in WRITES.items() if not BY_TYPE[kind].copies}
"""The same, of those that write a part and copy no whole operand."""
VIEWS = frozenset(kind for kind, operator in BY_TYPE.items() if operator.view)
"""Types of operators whose result may share the memory of their first input."""


def record_of(node: Node) -> NpuOperator | None:
    """The record of an operator of a graph; None where there is none."""
    return BY_TARGET.get(node.called) or BY_TYPE.get(node.type)


def types_of(collective: str) -> tuple[str, ...]:
    """GE's operators for a collective of partitioned graphs."""
    return tuple(kind for kind, operator in BY_TYPE.items() if operator.collective == collective and kind in operator.ge)


def group_of(op_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The symbolic group, one of `ge_file.GROUPS`, that a call of an overload names.

    Raises:
        LoweringError: the operator does not communicate, or the call names no group.
    """
    if op_name not in GROUP_ARGUMENTS:
        raise LoweringError(f"{op_name} does not communicate; those that do are {sorted(GROUP_ARGUMENTS)}")
    position, name = GROUP_ARGUMENTS[op_name]
    group_name = args[position] if len(args) > position else kwargs.get(name)
    if not isinstance(group_name, str):
        raise LoweringError(f"{op_name}: its group is {group_name!r}; legal is a name, such as 'tp', 'world' or 'dispatch'")
    return group_name
