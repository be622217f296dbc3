"""How many rows the experts of a rank get."""

from __future__ import annotations

from collections.abc import Mapping

from ..operators.node import Node
from ..operators.table import BY_TYPE
from ..operators.tensor_type import TensorType
from ..operators.work import Rows

_DEPTH = 24
"""Operators between a list of group sizes and the routing that it comes from."""


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
        found, following = None, []
        for tensor in queue:
            op = ops.get(tensor.rpartition(":")[0])
            if op is None or op.name in seen:
                continue
            seen.add(op.name)
            operator = BY_TYPE.get(op.type)
            if found is None and operator is not None and operator.routed is not None:
                found = operator.routed(op, types, ranks)
            following += op.reads
        if found:
            return found
        queue = following
    return None
