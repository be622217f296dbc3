"""Which operators of a GE graph start a kernel in each step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

from .operators.table import COMMUNICATING, VIEWS

BORDER = ("Data", "Const", "NetOutput")
"""Operands, constants and the list of results: nothing runs for them."""

T = TypeVar("T", bound=Any)
_KIND = re.compile(r"(?:\w*?layer\d+_)?(\w+?)(?:_\d+)?")


def launches(ops: Iterable[T]) -> list[T]:
    """Operators that are neither constants, nor views, nor computed from constants alone; in the order of the graph.

    GE computes what depends on constants alone when it compiles, and gives reshapes the memory of their input (`GeDeletedOp` in the
    graph engine's local operators). A slice, a split and a transposition copy, hence they count. So does `Identity`, although GE removes
    most of them (`IdentityPass`): it keeps those that separate a read from a write in place, and which ones is known to GE alone.

    Args:
        ops: in topological order, as messages or as nodes.
    """
    constant: set[str] = set()
    started = []
    for op in ops:
        if op.type == "Const":
            constant.add(op.name)
        elif op.type not in BORDER:
            producers = {tensor.rpartition(":")[0] for tensor in op.input if tensor and not tensor.endswith(":-1")}
            if producers <= constant and op.type not in COMMUNICATING:
                constant.add(op.name)
            elif op.type not in VIEWS:
                started.append(op)
    return started


def body_of(name: str) -> str:
    """The body that an operator belongs to: `layer00_linear_attention` of `layer00_linear_attention/MatMul`."""
    return name.rpartition("/")[0]


def kind_of(body: str) -> str:
    """The kind of a body: `layer07_full_attention` and `full_attention_7` are `full_attention`; operators in no body are `main`."""
    match = _KIND.fullmatch(body.rpartition("/")[2])
    return match[1] if match else "main"
