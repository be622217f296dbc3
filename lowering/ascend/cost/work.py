"""What one launch reads, writes, computes and sends, by its operator's record."""

from __future__ import annotations

from ....graphs.errors import LoweringError
from ..operators.node import Node
from ..operators.table import BY_TYPE, COMMUNICATING
from ..operators.work import Facts, Work, generic

_HCCL = "Hcom"
"""Beginning of the names of HCCL's collectives."""


def works_of(op: Node, facts: Facts) -> tuple[Work, ...]:
    """The work of one launch, in the stages that it runs one after the other: one, but of operators that compute and communicate.

    Raises:
        LoweringError: as `work_of`.
    """
    operator = BY_TYPE.get(op.type)
    return operator.stages(op, facts) if operator is not None and operator.stages is not None else (work_of(op, facts),)


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
