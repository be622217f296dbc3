"""How many rows the experts of a rank get, and how many of its experts get any."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ge_types import TensorType

_DEPTH = 24
"""Operators between a list of group sizes and the routing that it comes from."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a grouped product; a row is a token and one of its experts.

    Attributes:
        local: rows of the experts of a rank if all ranks get equally many.
        total: rows of all experts that the tokens of these experts choose from.
        local_experts: experts of a rank.
        experts: experts of all ranks.
    """

    local: float
    total: float
    local_experts: int
    experts: int


def routed_rows(ops: Mapping[str, Any], types: Mapping[str, TensorType], group_list: str, ranks: int) -> Rows | None:
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
            found = found or _source(op, types, ranks)
            following += [t for t in op.input if t and not t.endswith(":-1")]
        if found:
            return found
        queue = following
    return None


def _source(op: Any, types: Mapping[str, TensorType], ranks: int) -> Rows | None:
    if op.type.startswith("MoeDistributeDispatch"):
        choices, ep, experts = types[op.input[1]].elements, int(op.attr["ep_world_size"].i), int(op.attr["moe_expert_num"].i)
        return Rows(choices, choices * ep, experts // ep, experts)
    if op.type.startswith("MoeInitRouting"):
        choices, experts = types[op.input[1]].elements, int(op.attr["expert_num"].i)
        first, last = [*op.attr["active_expert_range"].list.i, 0, experts][:2] if op.attr["active_expert_range"].list.i else (0, experts)
        if last - first == experts and ranks > 1:
            return Rows(choices, choices * ranks, experts // ranks, experts)
        return Rows(choices * (last - first) / experts, choices, last - first, experts)
    return None


@functools.lru_cache(maxsize=256)
def experts_read(rows: Rows, skew: float) -> float:
    """Experts of a rank that get at least a row, and whose weights are read, on average.

    The i-th most popular of n experts is chosen with a probability in proportion to i^-skew, independently for each row.
    """
    weights = [math.exp(-skew * math.log(i + 1)) for i in range(rows.experts)]
    scale = 1 / sum(weights)
    chosen = sum(1 - math.exp(rows.total * math.log1p(-min(weight * scale, 1 - 1e-12))) for weight in weights)
    return chosen * rows.local_experts / rows.experts
