"""A stream of its own for the shared expert: its products run while tokens travel to the experts of other devices and back.

GE runs the operators of a label on one stream, beside the others, and orders streams by data (docs/zh/ascend_ir/features/advanced/
multi_stream.md of Ascend/torchair, fced884, which writes the attributes for `npu_stream_switch`). The same document advises against
streams inside a super kernel, which could not take dispatch and combine in either; so no super kernel is marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .operators.table import types_of

LABEL, PRIORITY = "_user_stream_label", "_user_stream_priority"
SHARED_EXPERT = "shared_expert"
"""The label."""

_DISPATCHES, _COMBINES = types_of("moe_dispatch"), types_of("moe_combine")


def label_shared_expert(ops: Sequence[Any]) -> None:
    """Labels the operators of a body that a combine takes as the shared expert's output and that no dispatch waits for.

    Args:
        ops: OpDef messages of a body, each after those that it reads.
    """
    combines = [op for op in ops if op.type in _COMBINES]
    by_name = {op.name: op for op in ops}
    outputs = [source for op in combines if (source := _input(op, "shared_expert_x")) in by_name]
    if not outputs:
        return
    # Later dispatches wait for earlier combines, and so for the shared expert; the first one is what it runs beside.
    sent = _ancestors(by_name, [next(op.name for op in ops if op.type in _DISPATCHES)])
    for name in _ancestors(by_name, outputs) - sent:
        op = by_name[name]
        if op.type != "Const":
            op.attr[LABEL].s, op.attr[PRIORITY].s = SHARED_EXPERT.encode(), b"0"


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
