"""What one launch reads, writes, computes and sends, by its operator's record, and how many rows the experts of a rank get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....graphs.errors import LoweringError
from ..operators.node import Node
from ..operators.table import BY_TYPE, COMMUNICATING
from ..operators.tensor_type import TensorType
from ..operators.work import Facts, Rows, Work, generic

_DEPTH = 24
"""Operators between a list of group sizes and the routing that it comes from."""
_HCCL = "Hcom"
"""Beginning of the names of HCCL's collectives."""


def works_of(op: Node, facts: Facts) -> tuple[Work, ...]:
    """The work of one launch, in the stages that it runs one after the other: one, but of operators that compute and communicate.

    Raises:
        LoweringError: as `work_of`.
    """
    operator = BY_TYPE.get(op.type)
    if operator is None:
        return (work_of(op, facts),)
    stages = operator.stages(op, facts) if operator.stages is not None else (work_of(op, facts),)
    return tuple(replace(stage, time=operator.time) for stage in stages)


def work_of(op: Node, facts: Facts) -> Work:
    """The work of one launch.

    Raises:
        LoweringError: it communicates over a group that the mesh does not have, or lacks an input that its work follows from.
    """
    operator = BY_TYPE.get(op.type)
    if operator is not None and operator.work is not None:
        return operator.work(op, facts)
    if op.type.startswith(_HCCL):
        legal = ", ".join(kind for kind in COMMUNICATING if kind.startswith(_HCCL))
        raise LoweringError(f"{op.name} ({op.type}) is a collective whose bytes are not known; legal are {legal}")
    return generic(op, facts, written=operator.writes if operator is not None else ())


def routed_rows(ops: Mapping[str, Node], types: Mapping[str, TensorType], group_list: str, ranks: int) -> Rows | None:
    """Rows behind a list of group sizes, from the dispatch or routing that it comes from; None where there is none.

    Args:
        ops: operators by name.
        types: type of each tensor.
        group_list: the tensor with the group sizes.
        ranks: ranks that share the experts, where the routing itself does not say.
    """
    queue, seen = [group_list], set()
    for _ in range(_DEPTH):
        routed, following = None, []
        for tensor in queue:
            op = ops.get(tensor.rpartition(":")[0])
            if op is None or op.name in seen:
                continue
            seen.add(op.name)
            operator = BY_TYPE.get(op.type)
            if routed is None and operator is not None and operator.routed is not None:
                routed = operator.routed(op, types, ranks)
            following += op.reads
        if routed:
            return routed
        queue = following
    return None
