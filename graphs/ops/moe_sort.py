"""Sorting of tokens by their experts, and the way back from the experts' rows to tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows


class MoeSort(NamedTuple):
    """Operands of `moe_sort`."""

    x: Tensor  # [T, M]
    ids: Tensor  # [T, X] int32: in [0, experts) for experts of this device, in [experts, all_experts) for others'
    experts: int  # E, experts of this device
    all_experts: int  # experts of all devices
    quantise: bool  # round each row to int8


class MoeUnsort(NamedTuple):
    """Operands of `moe_unsort`."""

    rows: Tensor  # [T*X, M]
    weights: Tensor  # [T, X] f32
    row_index: Tensor  # [T*X] int32: the row of each choice, or -1


moe_sort = Primitive("moe_sort", MoeSort, factors="_ _, _ _ -> _ _, _, _, _")

moe_unsort = Primitive("moe_unsort", MoeUnsort, factors="_ _, _ _, _ -> _ _")

Sorted = tuple[Tensor, Tensor, Tensor, Tensor]


def grouped(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts flat choices by expert, those of other devices last.

    Args:
        ids: [C] int32; outside [0, experts) the expert is another device's.
        experts: E.

    Returns:
        the choice of each row [C] int64, and the number of rows of each expert [E] int64.
    """
    local = (ids >= 0) & (ids < experts)
    order = torch.sort(torch.where(local, ids, experts), stable=True).indices
    counts = (ids[None, :] == torch.arange(experts, dtype=ids.dtype, device=ids.device)[:, None]).sum(1)
    return order, counts


@moe_sort.abstract
def _sort_abstract(args: MoeSort) -> Sorted:
    x, choices, device = args.x, args.ids.shape[0] * args.ids.shape[1], args.x.device
    return (
        torch.empty((choices, x.shape[1]), dtype=torch.int8 if args.quantise else x.dtype, device=device),
        torch.empty(choices, dtype=torch.float32, device=device),
        torch.empty(args.experts, dtype=torch.int64, device=device),
        torch.empty(choices, dtype=torch.int32, device=device),
    )


@moe_sort.reference
def moe_sort_reference(args: MoeSort) -> Sorted:
    """One row a choice (t, x), grouped by expert, in order of choice inside a group.

    Returns:
        rows [T*X, M] (dtype of x, or int8); their scales [T*X] f32 (ones where not quantised, unspecified on a device); rows of
        each expert [E] int64; and index [T*X] int32, the row of choice t*X+x, or -1 where its expert is another device's. Rows
        from the sum of the counts on are unspecified; here they are zero.
    """
    flat = args.ids.flatten()
    order, counts = grouped(flat, args.experts)
    position = torch.arange(flat.shape[0], device=args.x.device)
    local = position < counts.sum()
    rows = torch.where(local[:, None], args.x.index_select(0, order // args.ids.shape[1]), 0)
    index = torch.empty_like(order).scatter(0, order, torch.where(local, position, -1)).to(torch.int32)
    if args.quantise:
        return *quantise_rows(rows), counts, index
    return rows, torch.ones(flat.shape, dtype=torch.float32, device=args.x.device), counts, index


@moe_sort.lowering("npu")
def moe_sort_ge(args: MoeSort) -> Sorted:
    """One routing kernel, which gives counts (not their sums) and, for each choice, its row."""
    rows, index, counts, row_scale = torch.ops.npu.npu_moe_init_routing_v2(
        args.x,
        args.ids,
        active_num=args.ids.shape[0] * args.ids.shape[1],
        expert_capacity=-1,
        expert_num=args.all_experts,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=1 if args.quantise else -1,
        active_expert_range=[0, args.experts],
        row_idx_type=0,
    )
    return rows, row_scale, counts, index


@moe_sort.cost
def _sort_cost(args: MoeSort) -> Cost:
    x, choices = args.x, args.ids.shape[0] * args.ids.shape[1]
    width = 1 if args.quantise else x.dtype.itemsize
    return Cost(3 * choices * x.shape[1] * args.quantise, nbytes(x, args.ids), choices * (x.shape[1] * width + 8) + 8 * args.experts)


@moe_unsort.abstract
def _unsort_abstract(args: MoeUnsort) -> Tensor:
    return torch.empty((args.weights.shape[0], args.rows.shape[1]), dtype=args.rows.dtype, device=args.rows.device)


@moe_unsort.reference
def moe_unsort_reference(args: MoeUnsort) -> Tensor:
    """`sum_x weights[t, x] * rows[row_index[t*X + x]]` in f32, where the index is not -1.

    Returns:
        [T, M], dtype of rows.
    """
    rows, weights, index = args
    local = index >= 0
    chosen = torch.where(local[:, None], rows.index_select(0, index.clamp(min=0)), 0).float()
    return (chosen.view(*weights.shape, -1) * weights.float()[:, :, None]).sum(1).to(rows.dtype)


@moe_unsort.lowering("npu")
def moe_unsort_ge(args: MoeUnsort) -> Tensor:
    """One kernel, in the mode (3) whose index may be -1: it takes rows as [E, C, M] and counts them as if they were flat.

    Weights are f32 beside bfloat16 rows too (moe_finalize_routing_v2_def.cpp of hicann/ops-transformer, 8.5.0.alpha001).
    """
    rows, weights, index = args
    tokens, choices = weights.shape
    out: Tensor = torch.ops.npu.npu_moe_finalize_routing(
        rows.view(choices, tokens, -1), None, None, None, weights, index, None, drop_pad_mode=3
    )
    return out


@moe_unsort.cost
def _unsort_cost(args: MoeUnsort) -> Cost:
    rows, weights, _ = args
    return Cost(2 * rows.numel(), nbytes(*args), weights.shape[0] * rows.shape[1] * rows.dtype.itemsize)
