"""Turns tokens and their chosen experts into rows grouped by expert, and the experts' rows back into tokens."""

import torch

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows

moe_sort = Primitive(
    "moe_sort",
    "(Tensor x, Tensor ids, int experts, int all_experts, bool quantise) -> (Tensor, Tensor, Tensor, Tensor)",
    factors="_ _, _ _ -> _ _, _, _, _",
)

moe_unsort = Primitive("moe_unsort", "(Tensor rows, Tensor weights, Tensor index) -> Tensor", factors="_ _, _ _, _ -> _ _")


def grouped(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts flat choices by expert, those of other devices last.

    Args:
        ids: [C] int32; outside [0, experts) the expert is another device's.
        experts: E.

    Returns:
        the choice each row holds [C] int64, and the rows of each expert [E] int64.
    """
    local = (ids >= 0) & (ids < experts)
    order = torch.sort(torch.where(local, ids, experts), stable=True).indices
    counts = (ids[None, :] == torch.arange(experts, dtype=ids.dtype, device=ids.device)[:, None]).sum(1)
    return order, counts


@moe_sort.abstract
def _sort_abstract(
    x: torch.Tensor, ids: torch.Tensor, experts: int, all_experts: int, quantise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    choices = ids.shape[0] * ids.shape[1]
    return (
        torch.empty((choices, x.shape[1]), dtype=torch.int8 if quantise else x.dtype, device=x.device),
        torch.empty(choices, dtype=torch.float32, device=x.device),
        torch.empty(experts, dtype=torch.int64, device=x.device),
        torch.empty(choices, dtype=torch.int32, device=x.device),
    )


@moe_sort.reference
def moe_sort_reference(
    x: torch.Tensor, ids: torch.Tensor, experts: int, all_experts: int, quantise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row a choice (t, x), grouped by expert, in order of choice inside a group.

    Args:
        x: [T, M].
        ids: [T, X] int32: in [0, experts) for experts of this device, in [experts, all_experts) for others'.
        experts: E, experts of this device.
        all_experts: experts of all devices.
        quantise: round each row to int8.

    Returns:
        rows [T*X, M] (dtype of x, or int8); their scales [T*X] f32 (ones where not quantised, unspecified on a device); rows of
        each expert [E] int64; and index [T*X] int32, the row of choice t*X+x, or -1 where its expert is another device's. Rows
        from the sum of the counts on are unspecified; here they are zero.
    """
    flat = ids.flatten()
    order, counts = grouped(flat, experts)
    place = torch.arange(flat.shape[0], device=x.device)
    held = place < counts.sum()
    rows = torch.where(held[:, None], x.index_select(0, order // ids.shape[1]), 0)
    index = torch.empty_like(order).scatter(0, order, torch.where(held, place, -1)).to(torch.int32)
    if quantise:
        return *quantise_rows(rows), counts, index
    return rows, torch.ones(flat.shape, dtype=torch.float32, device=x.device), counts, index


@moe_sort.lowering("ge")
def moe_sort_ge(
    x: torch.Tensor, ids: torch.Tensor, experts: int, all_experts: int, quantise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One routing kernel, which gives counts (not their sums) and, for each choice, its row."""
    rows, index, counts, row_scale = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=ids.shape[0] * ids.shape[1],
        expert_capacity=-1,
        expert_num=all_experts,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1 if quantise else -1,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )
    return rows, row_scale, counts, index


@moe_sort.cost
def _sort_cost(x: torch.Tensor, ids: torch.Tensor, experts: int, all_experts: int, quantise: bool) -> Cost:
    choices = ids.shape[0] * ids.shape[1]
    width = 1 if quantise else x.dtype.itemsize
    return Cost(3 * choices * x.shape[1] * quantise, nbytes(x, ids), choices * (x.shape[1] * width + 8) + 8 * experts)


@moe_unsort.abstract
def _unsort_abstract(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.empty((weights.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)


@moe_unsort.reference
def moe_unsort_reference(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`sum_x weights[t, x] * rows[index[t*X + x]]` in f32, where index is not -1.

    Args:
        rows: [T*X, M].
        weights: [T, X].
        index: [T*X] int32, a row or -1.

    Returns:
        [T, M], dtype of rows.
    """
    here = index >= 0
    chosen = torch.where(here[:, None], rows.index_select(0, index.clamp(min=0)), 0).float()
    return (chosen.view(*weights.shape, -1) * weights.float()[:, :, None]).sum(1).to(rows.dtype)


@moe_unsort.lowering("ge")
def moe_unsort_ge(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One kernel, in the mode (3) whose index may be -1: it takes rows as [E, C, M] and counts them as if they were flat."""
    tokens, choices = weights.shape
    out: torch.Tensor = torch.ops.npu.npu_moe_finalize_routing(
        rows.view(choices, tokens, -1), None, None, None, weights.to(rows.dtype), index, None, drop_pad_mode=3
    )
    return out


@moe_unsort.cost
def _unsort_cost(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> Cost:
    return Cost(2 * rows.numel(), nbytes(rows, weights, index), weights.shape[0] * rows.shape[1] * rows.dtype.itemsize)
