"""Turns rows grouped by expert into those experts' outputs."""

from collections.abc import Callable

import torch

from ..primitive import Cost, Primitive, nbytes

grouped_experts = Primitive(
    "grouped_experts",
    "(Tensor rows, Tensor counts, Tensor gate_up, Tensor down) -> Tensor",
    factors="_ _, _, _ _ _, _ _ _ -> _ _",
)

Expert = Callable[..., torch.Tensor]
"""An expert's output of some rows: `expert(e, rows, ...)`, each operand with one entry a row."""


def each_group(expert: Expert, counts: torch.Tensor, width: int, dtype: torch.dtype, *operands: torch.Tensor) -> torch.Tensor:
    """Runs each expert on its own rows; rows of nobody, the last ones, become zeros.

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


def every_group(expert: Expert, counts: torch.Tensor, width: int, dtype: torch.dtype, *operands: torch.Tensor) -> torch.Tensor:
    """The same with static shapes: every expert runs on every row, and the row keeps its own."""
    R = operands[0].shape[0]
    owner = torch.searchsorted(counts.cumsum(0), torch.arange(R, device=counts.device), right=True)
    out = torch.zeros(R, width, dtype=dtype, device=counts.device)
    for e in range(counts.shape[0]):
        out = torch.where((owner == e)[:, None], expert(e, *operands), out)
    return out


@grouped_experts.abstract
def _abstract(rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


def _expert(gate_up: torch.Tensor, down: torch.Tensor) -> Expert:
    def expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = (rows @ gate_up[e]).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ down[e]

    return expert


@grouped_experts.reference
def grouped_experts_reference(rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`(silu(row @ gate[e]) * (row @ up[e])) @ down[e]` for each row of expert e.

    Args:
        rows: [R, M], the first counts[0] of expert 0, then counts[1] of expert 1, ...
        counts: [E] int64, at most R together.
        gate_up: [E, M, 2F], gate then up.
        down: [E, F, M].

    Returns:
        [R, M], dtype of rows; from the sum of counts on unspecified, here zero.
    """
    return each_group(_expert(gate_up, down), counts, rows.shape[1], rows.dtype, rows)


@grouped_experts.lowering("inductor")
def grouped_experts_static(rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Every expert on every row."""
    return every_group(_expert(gate_up, down), counts, rows.shape[1], rows.dtype, rows)


@grouped_experts.lowering("ge")
def grouped_experts_ge(rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Two grouped products around one activation."""
    npu = torch.ops.npu
    groups = {"group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 1}
    hidden = npu.npu_swiglu(npu.npu_grouped_matmul([rows], [gate_up], **groups)[0])
    out: torch.Tensor = npu.npu_grouped_matmul([hidden], [down], **groups)[0]
    return out


def experts_cost(rows: torch.Tensor, written: int, weights: list[torch.Tensor], *small: torch.Tensor) -> Cost:
    """Cost of experts on R rows, were none of them empty; not every expert is read when there are fewer rows.

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


def _hidden(gate_up: torch.Tensor) -> int:
    """F of a [E, M, 2F] weight; eight int4 are one int32."""
    return gate_up.shape[2] // 2 * (8 if gate_up.dtype == torch.int32 else 1)


@grouped_experts.cost
def _cost(rows: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Cost:
    return experts_cost(rows, nbytes(rows), [gate_up, down], counts)
