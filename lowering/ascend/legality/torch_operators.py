"""What runs a torch operator on an NPU: the aclnn function or kernel of the table, and how arguments map to it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ...artifact import graph_io
from .. import packages
from .table import rows, table

_REQUIRED = frozenset({"operators", "runs", "outputs", "source"})
_OPTIONAL = frozenset({"schema", "inputs", "attributes", "free", "packed", "assumed"})


@dataclass(frozen=True)
class TorchOperator:
    """One row: torch operators that the same function runs.

    Attributes:
        operators: overloads by their names in graphs, "npu.npu_swiglu.default".
        runs: what facts of the table are about it: an aclnn function ("aclnnAdd"), a kernel by its type in GE ("SwiGlu") where the aclnn
            function launches that kernel with the operands that it was given, or a function of a package; "" where nothing runs.
        source: file that calls it.
        schema: of an operator of torch_npu, without its name; others are registered wherever torch is.
        inputs: input in the table by argument.
        attributes: attribute in the table by argument.
        free: arguments of which no restriction is known.
        packed: arguments in which an int32 holds eight int4.
        outputs: output in the table of each result, in order; the rest is not checked.
        assumed: what is assumed of `runs` although no public source says it, or "".
    """

    operators: tuple[str, ...]
    runs: str
    source: str
    schema: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    packed: frozenset[str] = frozenset()
    outputs: tuple[str, ...] = ()
    assumed: str = ""


@dataclass(frozen=True)
class Argument:
    """An argument of a torch operator."""

    name: str
    default: Any


@functools.cache
def torch_operators() -> Mapping[str, TorchOperator]:
    """The rows of this package by the names of their operators."""
    return read(rows("torch"))


def read(given: Iterable[Mapping[str, Any]]) -> Mapping[str, TorchOperator]:
    """Reads and validates rows.

    Raises:
        LoweringError: a row lacks a field or has an unknown one, an operator has two rows, or the table has no facts of what runs.
    """
    by_name: dict[str, TorchOperator] = {}
    for row in given:
        if row.keys() - _REQUIRED - _OPTIONAL or _REQUIRED - row.keys():
            legal = f"legal are {sorted(_REQUIRED)}, and any of {sorted(_OPTIONAL)}"
            raise LoweringError(f"the row of torch operators {row.get('operators')} has the fields {sorted(row)}; {legal}")
        if row["runs"] and row["runs"] not in table().by_operator:
            raise LoweringError(f"{row['operators']} run {row['runs']}, of which the legality table has no facts; legal is to add them")
        sets = {name: frozenset(row.get(name, ())) for name in ("free", "packed")}
        tuples = {name: tuple(row[name]) for name in ("operators", "outputs")}
        operator = TorchOperator(**{**row, **sets, **tuples})
        if twice := [name for name in operator.operators if name in by_name]:
            raise LoweringError(f"torch operators {twice} have two rows; legal is one")
        by_name |= dict.fromkeys(operator.operators, operator)
    return by_name


@functools.cache
def arguments(name: str, schema: str) -> tuple[Argument, ...]:
    """Arguments of a torch operator in order.

    Args:
        name: in graphs.
        schema: of its row, or "" for an operator that torch or packages.py declares.

    Raises:
        LoweringError: nobody declares it.
    """
    parsed = torch._C.parse_schema(f"npu::checked{schema}") if schema else _declared(name)
    return tuple(Argument(argument.name, argument.default_value) for argument in parsed.arguments)


def _declared(name: str) -> Any:
    namespace, operator, _ = name.split(".", 2)
    for of_package in (operator for operators in packages.OPERATORS.values() for operator in operators):
        if of_package.name == f"{namespace}::{operator}":
            return torch._C.parse_schema(of_package.name + of_package.schema)
    target: Any = graph_io.find_target(name)
    return target._schema
