"""Turns each device's tokens into rows at the devices that hold their experts, and those rows' results into tokens again."""

from typing import Any

import torch

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows
from .moe_sort import grouped

moe_dispatch = Primitive(
    "moe_dispatch",
    "(Tensor x, Tensor ids, Tensor rank, int experts, str group, int ranks, bool quantise) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    factors="_ _, _ _, _ -> _ _, _, _, _, _",
)

moe_combine = Primitive(
    "moe_combine",
    "(Tensor rows, Tensor ids, Tensor weights, Tensor assist, Tensor recv_counts, Tensor rank, "
    "int experts, str group, int ranks) -> Tensor",
    factors="_ _, _ _, _ _, _, _, _ -> _ _",
)

ASSIST = 128
"""int32 numbers the kernels keep for each row; the reference uses the first three: source rank, token there, choice there."""

Dispatched = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rows_at_most(tokens: int, choices: int, experts: int, ranks: int) -> int:
    """R, the rows that one device can get: each token, of any device, comes once for each expert here at most."""
    return tokens * ranks * min(choices, experts // ranks)


@moe_dispatch.abstract
def _dispatch_abstract(
    x: torch.Tensor, ids: torch.Tensor, rank: torch.Tensor, experts: int, group: str, ranks: int, quantise: bool
) -> Dispatched:
    R = rows_at_most(ids.shape[0], ids.shape[1], experts, ranks)
    return (
        torch.empty((R, x.shape[1]), dtype=torch.int8 if quantise else x.dtype, device=x.device),
        torch.empty(R, dtype=torch.float32, device=x.device),
        torch.empty(experts // ranks, dtype=torch.int64, device=x.device),
        torch.empty(R * ASSIST, dtype=torch.int32, device=x.device),
        torch.empty(experts, dtype=torch.int32, device=x.device),
    )


@moe_dispatch.reference
def moe_dispatch_reference(
    x: torch.Tensor, ids: torch.Tensor, rank: torch.Tensor, experts: int, group: str, ranks: int, quantise: bool
) -> Dispatched:
    """Sends each token to the devices of its experts; the devices of a group call it together, with as many tokens each.

    Args:
        x: [t, M].
        ids: [t, X] int32 in [0, experts), no expert twice in a row.
        rank: [1] int32, this device's place in the group; experts rank*E .. rank*E+E-1 are its own.
        experts: of all devices.
        group: the group's name.
        ranks: devices in the group; divides experts.
        quantise: round each row to int8, before it is sent.

    Returns:
        rows [R, M] (dtype of x, or int8) grouped by expert, with R as `rows_at_most` says; their scales [R] f32 (ones where not
        quantised, unspecified on a device); rows of each expert here [E] int64; and two records for `moe_combine` alone,
        [R*128] int32 and [experts] int32. Rows from the sum of the counts on are unspecified; here they are zero.
    """
    rows, scale = (_gather(part, ranks, group) for part in _to_send(x, quantise))
    return _received(rows, scale, _gather(ids, ranks, group), rank, experts, ranks)


def _to_send(x: torch.Tensor, quantise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_rows(x) if quantise else (x, torch.ones(x.shape[0], dtype=torch.float32, device=x.device))


def _gather(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    if ranks == 1:
        return part
    collectives = torch.ops._c10d_functional
    whole: torch.Tensor = collectives.wait_tensor(collectives.all_gather_into_tensor(part.contiguous(), ranks, group))
    return whole


def _received(rows: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor, rank: torch.Tensor, experts: int, ranks: int) -> Dispatched:
    """What one device gets of all devices' rows [ranks*t, M], scales [ranks*t] and choices [ranks*t, X]."""
    choices, here = ids.shape[1], experts // ranks
    tokens = ids.shape[0] // ranks
    R = rows_at_most(tokens, choices, experts, ranks)
    flat = (ids - rank * here).flatten()
    order, counts = grouped(flat, here)
    order = order[:R]
    held = torch.arange(R, device=rows.device) < counts.sum()
    token, choice = order // choices, order % choices
    source = torch.stack([token // tokens, token % tokens, choice], 1)
    assist = torch.nn.functional.pad(torch.where(held[:, None], source, 0), (0, ASSIST - 3)).flatten().to(torch.int32)
    got = torch.where(held[:, None], rows.index_select(0, token), 0)
    got_scale = torch.where(held, scale.index_select(0, token), 0)
    return got, got_scale, counts, assist, _prefixes(flat, here, ranks)


def _prefixes(flat: torch.Tensor, here: int, ranks: int) -> torch.Tensor:
    """[here * ranks] int32: how many rows there are up to each expert's rows from each rank, this one included."""
    own = torch.arange(here, dtype=flat.dtype, device=flat.device)
    return (flat.view(1, ranks, -1) == own[:, None, None]).sum(2).flatten().cumsum(0).to(torch.int32)


@moe_dispatch.together
def moe_dispatch_together(calls: list[tuple[Any, ...]]) -> list[Dispatched]:
    """Every member's results, from every member's operands in the order of their ranks; nothing is sent."""
    sent = [_to_send(x, quantise) for x, *_, quantise in calls]
    rows, scale = (torch.cat(parts) for parts in zip(*sent, strict=True))
    ids = torch.cat([call[1] for call in calls])
    return [_received(rows, scale, ids, rank, experts, ranks) for _, _, rank, experts, _, ranks, _ in calls]


@moe_dispatch.lowering("ge")
def moe_dispatch_ge(
    x: torch.Tensor, ids: torch.Tensor, rank: torch.Tensor, experts: int, group: str, ranks: int, quantise: bool
) -> Dispatched:
    """One kernel. Its rank is an attribute, and one graph serves all ranks: 0 here, the runtime writes each device's own."""
    rows, scale, assist, counts, recv_counts, _, _ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        x, ids, group, ranks, 0, experts, quant_mode=2 if quantise else 0, expert_token_nums_type=1
    )
    return rows, scale, counts, assist, recv_counts


@moe_dispatch.cost
def _dispatch_cost(x: torch.Tensor, ids: torch.Tensor, rank: torch.Tensor, experts: int, group: str, ranks: int, quantise: bool) -> Cost:
    results = _dispatch_abstract(x.to("meta"), ids.to("meta"), rank.to("meta"), experts, group, ranks, quantise)
    return Cost(3 * x.numel() * quantise, nbytes(x, ids), nbytes(*results))


@moe_combine.abstract
def _combine_abstract(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    assist: torch.Tensor,
    recv_counts: torch.Tensor,
    rank: torch.Tensor,
    experts: int,
    group: str,
    ranks: int,
) -> torch.Tensor:
    return torch.empty((ids.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)


@moe_combine.reference
def moe_combine_reference(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    assist: torch.Tensor,
    recv_counts: torch.Tensor,
    rank: torch.Tensor,
    experts: int,
    group: str,
    ranks: int,
) -> torch.Tensor:
    """Sends rows back to their tokens' devices and sums them by weight, in f32; the devices of a group call it together.

    Args:
        rows: [R, M], in the order of `moe_dispatch`.
        ids: [t, X] int32, what `moe_dispatch` was given.
        weights: [t, X].
        assist, recv_counts: from `moe_dispatch`.
        rank, experts, group, ranks: what `moe_dispatch` was given.

    Returns:
        [t, M], dtype of rows.
    """
    total = _spread(rows, _gather(weights, ranks, group), assist, recv_counts, ids.shape[0])
    if ranks > 1:
        collectives = torch.ops._c10d_functional
        total = collectives.wait_tensor(collectives.reduce_scatter_tensor(total, "sum", ranks, group))
    return total.to(rows.dtype)


def _spread(rows: torch.Tensor, weights: torch.Tensor, assist: torch.Tensor, recv_counts: torch.Tensor, tokens: int) -> torch.Tensor:
    """One device's share of every token's sum: [ranks*t, M] f32, from the weights [ranks*t, X] of all tokens."""
    R, M = rows.shape
    rank, token, choice = assist.view(R, ASSIST)[:, :3].long().unbind(1)
    held = torch.arange(R, device=rows.device) < recv_counts[-1]
    flat = rank * tokens + token
    share = rows.float() * weights.float()[flat, choice][:, None]
    empty = torch.zeros(weights.shape[0], M, dtype=torch.float32, device=rows.device)
    return empty.index_add(0, flat, torch.where(held[:, None], share, 0))


@moe_combine.together
def moe_combine_together(calls: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Every member's result, from every member's operands in the order of their ranks; nothing is sent."""
    weights = torch.cat([call[2] for call in calls])
    shares = [_spread(rows, weights, assist, counts, ids.shape[0]) for rows, ids, _, assist, counts, *_ in calls]
    totals = torch.stack(shares).sum(0).chunk(len(calls))
    return [total.to(call[0].dtype) for total, call in zip(totals, calls, strict=True)]


@moe_combine.lowering("ge")
def moe_combine_ge(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    assist: torch.Tensor,
    recv_counts: torch.Tensor,
    rank: torch.Tensor,
    experts: int,
    group: str,
    ranks: int,
) -> torch.Tensor:
    """One kernel; its rank attribute as in `moe_dispatch_ge`."""
    out: torch.Tensor = torch.ops.npu.npu_moe_distribute_combine_v2(
        rows, ids, assist, recv_counts, weights.float(), group, ranks, 0, experts
    )
    return out


@moe_combine.cost
def _combine_cost(
    rows: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    assist: torch.Tensor,
    recv_counts: torch.Tensor,
    rank: torch.Tensor,
    experts: int,
    group: str,
    ranks: int,
) -> Cost:
    written = ids.shape[0] * rows.shape[1] * rows.dtype.itemsize
    return Cost(2 * rows.numel(), nbytes(rows, ids, weights, assist, recv_counts), written)
