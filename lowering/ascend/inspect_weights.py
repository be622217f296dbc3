"""Finds operators of a GE graph that depend on parameters alone: what they compute in every step could be computed once."""

from __future__ import annotations

import math
import re
from typing import Any

from ...graphs.errors import LoweringError
from .ge_file import GE_DTYPES, GeFile, messages
from .ge_operators import by_kind, read
from .inspect_ge import shape
from .operators.table import BY_TYPE, VIEWS

LARGE_BYTES = 2**20
"""A value derived from parameters that is larger is not kept beside the parameters that it is derived from."""


def work_on_weights(ge_file: GeFile, params: int) -> dict[str, frozenset[int]]:
    """Operators that read parameters, derived values (fold.py) and constants alone, and at least one that is no constant.

    Operators on constants alone are not counted: GE computes them when it compiles the graph.

    Args:
        params: number of parameters; they are the first operands.

    Returns:
        by the operator's name, the operands and derived values that it depends on.

    Raises:
        LoweringError: the graph is no GE model.
    """
    sources: dict[str, frozenset[int]] = {}
    work: dict[str, frozenset[int]] = {}
    for op in read(ge_file.graph):
        if op.type == "Data":
            operand = ge_file.data[op.attr["index"].i]
            if operand < params or operand >= ge_file.inputs:
                sources[op.name] = frozenset({operand})
        elif op.type == "Const":
            sources[op.name] = frozenset()
        elif op.producers and op.type != "NetOutput" and all(name in sources for name in op.producers):
            sources[op.name] = frozenset[int]().union(*(sources[name] for name in op.producers))
            if sources[op.name]:
                work[op.name] = sources[op.name]
    return work


def check_folded(ge_file: GeFile, params: int) -> None:
    """Proves that no step repeats work on weights, but for two kinds of operators.

    Legal are casts to a dtype that no operand can have, which a converter adds to what it converts; and values of more than `LARGE_BYTES`
    that are computed from a parameter which other operators read as well, since both would have to be held.

    Args:
        params: number of parameters; they are the first operands.

    Raises:
        LoweringError: naming the operators that are neither.
    """
    ops, nbytes = read(ge_file.graph), by_kind(_nbytes)
    work = work_on_weights(ge_file, params)
    data = {f"{op.name}:0": ge_file.data[op.attr["index"].i] for op in ops if op.type == "Data"}
    elsewhere = {data[tensor] for op in ops if op.name not in work for tensor in op.input if tensor in data}
    sizes: dict[str, int] = {}
    breaches = []
    # What work reads are parameters, constants and other work.
    for op in (op for op in ops if op.name in work or op.type in ("Data", "Const")):
        sizes[f"{op.name}:0"] = max(nbytes(op), sizes.get(op.input[0], 0) if op.type in VIEWS else 0)
        large = sizes[f"{op.name}:0"] > LARGE_BYTES and work.get(op.name, frozenset()) & elsewhere
        if op.name in work and not large and not _is_cast_to_no_operand(op):
            breaches.append(op.name)
    if breaches:
        names = ", ".join(breaches[:8]) + (", ..." if len(breaches) > 8 else "")
        raise LoweringError(
            f"{len(breaches)} operators depend on parameters alone and run in every step: {names}; legal are casts to a dtype that no "
            f"operand can have, and values of more than {LARGE_BYTES} bytes whose parameter others read too. hoist.py folds the rest"
        )


def _is_cast_to_no_operand(op: Any) -> bool:
    record = BY_TYPE.get(op.type)
    if record is None or not record.casts:
        return False
    attr = op.attr[record.casts]
    if attr.WhichOneof("value") == "dt":
        return attr.dt not in {messages().DataType.Value(name) for name, _ in GE_DTYPES.values()}
    return attr.i not in {number for _, number in GE_DTYPES.values()}


def _nbytes(op: Any) -> int:
    """Bytes of the largest result whose sizes the graph declares."""
    matches = [re.fullmatch(r"[a-z]+(\d*)\[([\d,]*)\]", shape(desc)) for desc in op.output_desc]
    return max((math.prod(map(int, filter(None, m[2].split(",")))) * int(m[1] or 8) // 8 for m in matches if m), default=0)
