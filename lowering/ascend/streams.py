"""Streams of their own for what communicates, or for what runs beside it, so that links carry tokens while cores compute.

GE runs the operators of a label on one stream, beside the others, and orders streams by data (docs/zh/ascend_ir/features/advanced/
multi_stream.md of Ascend/torchair, fced884, which writes the attributes for `npu_stream_switch`). The same document advises against
streams inside a super kernel, which could not take dispatch and combine in either; so no super kernel is marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .ge_file import PRIORITY, STREAM
from .operators.table import types_of

SHARED_EXPERT, EXCHANGE = "shared_expert", "exchange"
"""The labels."""

DISPATCHES, COMBINES = types_of("moe_dispatch"), types_of("moe_combine")


def label(ops: Sequence[Any]) -> None:
    """Labels operators of a body: its exchanges where there are several, else what runs beside the only one.

    A single exchange stays where its neighbours are: a stream of its own would wait for them and they for it.

    Args:
        ops: OpDef messages of a body, each after those that it reads.
    """
    exchanges = [op for op in ops if op.type in (*DISPATCHES, *COMBINES)]
    if len(exchanges) > 2:
        _label(exchanges, EXCHANGE)
    else:
        _label(_shared_expert(ops), SHARED_EXPERT)


def _label(ops: Sequence[Any], label: str) -> None:
    for op in ops:
        op.attr[STREAM].s, op.attr[PRIORITY].s = label.encode(), b"0"


def _shared_expert(ops: Sequence[Any]) -> list[Any]:
    """The operators that a combine takes as the shared expert's output and that no dispatch waits for."""
    combines = [op for op in ops if op.type in COMBINES]
    by_name = {op.name: op for op in ops}
    outputs = [source for op in combines if (source := _input(op, "shared_expert_x")) in by_name]
    if not outputs:
        return []
    sent = _ancestors(by_name, [op.name for op in ops if op.type in DISPATCHES])
    beside = _ancestors(by_name, outputs) - sent
    return [op for op in ops if op.name in beside and op.type != "Const"]


def _input(op: Any, slot: str) -> str:
    """The operator whose result an operator takes as `slot`; "" where it takes none."""
    named = zip(op.input, op.input_desc, strict=False)
    return next((tensor.rpartition(":")[0] for tensor, desc in named if desc.name == slot), "")


def _ancestors(by_name: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    """The operators of a body that these depend on by data, themselves included."""
    known, queue = set(names), list(names)
    while queue:
        sources = {tensor.rpartition(":")[0] for tensor in by_name[queue.pop()].input if not tensor.endswith(":-1")}
        new = {name for name in sources if name in by_name} - known
        known |= new
        queue += new
    return known
