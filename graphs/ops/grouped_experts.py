"""Experts over rows grouped by expert."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class GroupedExperts(NamedTuple):
    """Operands of `grouped_experts`."""

    rows: Tensor  # [R, M], the first counts[0] of expert 0, then counts[1] of expert 1, ...
    counts: Tensor  # [E] int64, at most R in sum
    gate_up: Tensor  # [E, M, 2F], gate then up
    down: Tensor  # [E, F, M]


grouped_experts = Primitive("grouped_experts", GroupedExperts, factors="_ _, _, _ _ _, _ _ _ -> _ _", like="rows")

Expert = Callable[..., Tensor]
"""An expert's output of some rows: `expert(e, rows, ...)`, each operand with one entry a row."""


def each_group(expert: Expert, counts: Tensor, width: int, dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """Runs each expert on its own rows; rows of no expert, the last ones, become zeros.

    Args:
        expert: what to run.
        counts: [E] int64.
        width: M, of the results.
        dtype: of the results.
        operands: [R, ...] each.

    Returns:
        [R, M].
    """
    pieces, start = [], 0
    for e, count in enumerate(counts.tolist()):
        if count:
            pieces.append(expert(e, *(operand[start : start + count] for operand in operands)))
        start += count
    return torch.cat([*pieces, torch.zeros(operands[0].shape[0] - start, width, dtype=dtype, device=counts.device)])


def every_group(expert: Expert, counts: Tensor, width: int, dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """As `each_group` with static shapes: every expert runs on every row, and the row keeps the result of its own."""
    R = operands[0].shape[0]
    owner = torch.searchsorted(counts.cumsum(0), torch.arange(R, device=counts.device), right=True)
    out = torch.zeros(R, width, dtype=dtype, device=counts.device)
    for e in range(counts.shape[0]):
        out = torch.where((owner == e)[:, None], expert(e, *operands), out)
    return out


def _run(runner: Callable[..., Tensor], args: GroupedExperts) -> Tensor:
    def expert(e: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ args.gate_up[e]).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ args.down[e]

    return runner(expert, args.counts, args.rows.shape[1], args.rows.dtype, args.rows)


@grouped_experts.reference
def grouped_experts_reference(args: GroupedExperts) -> Tensor:
    """`(silu(row @ gate[e]) * (row @ up[e])) @ down[e]` for each row of expert e.

    Returns:
        [R, M], dtype of rows; from the sum of counts on unspecified, here zero.
    """
    return _run(each_group, args)


@grouped_experts.lowering("inductor")
def grouped_experts_static(args: GroupedExperts) -> Tensor:
    """Every expert on every row."""
    return _run(every_group, args)


@grouped_experts.lowering("npu")
def grouped_experts_ge(args: GroupedExperts) -> Tensor:
    """Two grouped products around one activation."""
    npu = torch.ops.npu
    groups = {"group_list": args.counts, "split_item": 2, "group_type": 0, "group_list_type": 1}
    hidden = npu.npu_swiglu(npu.npu_grouped_matmul([args.rows], [args.gate_up], **groups)[0])
    out: Tensor = npu.npu_grouped_matmul([hidden], [args.down], **groups)[0]
    return out


def experts_cost(rows: Tensor, written: int, weights: list[Tensor], *small: Tensor) -> Cost:
    """Cost of experts on R rows, were none of them empty; with fewer rows than experts, not every expert is read.

    Args:
        rows: [R, M].
        written: bytes of the result.
        weights: [E, ...] each; the first is [E, M, ...].
        small: other operands.
    """
    R, M = rows.shape
    experts = weights[0].shape[0]
    touched = sum(nbytes(w) // experts * min(experts, R) for w in weights)
    return Cost(2 * R * M * 3 * _hidden(weights[0]), touched + nbytes(rows, *small), written)


def _hidden(gate_up: Tensor) -> int:
    """F of a [E, M, 2F] weight; eight int4 are one int32."""
    return gate_up.shape[2] // 2 * (8 if gate_up.dtype == torch.int32 else 1)


@grouped_experts.cost
def _cost(args: GroupedExperts) -> Cost:
    return experts_cost(args.rows, nbytes(args.rows), [args.gate_up, args.down], args.counts)
