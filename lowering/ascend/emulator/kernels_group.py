"""CPU kernels of collectives and expert exchange: the calls of all members of a group -> the result of each member.

Each function computes the results of the members that are named, or of all. Semantics: torch's functional collectives; the operator
documentation of Ascend/op-plugin for dispatch and combine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from .kernels_common import FLOATS, refuse_options, require, require_shape, to_int8, undefined

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of one member's call."""

# Integers in a row of assist_info; the real operator does not document their layout.
ASSIST = 128


def _reduced(op: str, tensors: list[torch.Tensor], how: str) -> torch.Tensor:
    stacked = torch.stack(tensors)
    if how == "sum":
        return (stacked.float() if stacked.dtype in FLOATS else stacked).sum(0).to(stacked.dtype)
    if how == "max":
        return stacked.amax(0)
    if how == "min":
        return stacked.amin(0)
    raise LoweringError(f"{op}: reduction {how!r}; legal is 'sum', 'max' or 'min'")


def _wanted(calls: list[Arguments], members: Sequence[int] | None) -> Sequence[int]:
    return range(len(calls)) if members is None else members


def _same_size(op: str, size: int, calls: list[Arguments]) -> None:
    if size != len(calls):
        raise LoweringError(f"{op}: the node says {size} members, the group of this mesh has {len(calls)}")


def all_reduce(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x, how, group) -> the elementwise reduction, float sums in float32, for each member."""
    total = _reduced("all_reduce", [args[0] for args, _ in calls], calls[0][0][1])
    return [total.clone() for _ in _wanted(calls, members)]


def all_gather_into_tensor(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x [n, ...], size, group) -> [size * n, ...], members in order, for each member."""
    _same_size("all_gather_into_tensor", calls[0][0][1], calls)
    whole = torch.cat([args[0] for args, _ in calls])
    return [whole.clone() for _ in _wanted(calls, members)]


def reduce_scatter_tensor(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x [size * n, ...], how, size, group) -> [n, ...], the member's part of the reduction."""
    op = "reduce_scatter_tensor"
    _same_size(op, calls[0][0][2], calls)
    total = _reduced(op, [args[0] for args, _ in calls], calls[0][0][1])
    if total.shape[0] % len(calls):
        raise LoweringError(f"{op}: the first size of {tuple(total.shape)} does not divide by the {len(calls)} members")
    parts = total.chunk(len(calls))
    return [parts[rank].clone() for rank in _wanted(calls, members)]


def all_to_all_single(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x, rows from each member, rows to each member, group) -> member i gets part i of every member, in order."""
    op = "all_to_all_single"
    for i, (args, _) in enumerate(calls):
        sizes = [len(args[1]), len(args[2]), len(calls)]
        if len(set(sizes)) != 1 or sum(args[2]) != args[0].shape[0]:
            raise LoweringError(f"{op}: member {i} of {len(calls)} sends {args[2]} and takes {args[1]} of {tuple(args[0].shape)}")
    parts = [args[0].split(list(args[2])) for args, _ in calls]
    for i, (args, _) in enumerate(calls):
        if (sent := [len(part[i]) for part in parts]) != list(args[1]):
            raise LoweringError(f"{op}: member {i} takes {list(args[1])} rows, the members send it {sent}")
    return [torch.cat([part[i] for part in parts]) for i in _wanted(calls, members)]


def broadcast(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x, source, group) -> the source member's x for each member."""
    source = calls[0][0][1]
    if not 0 <= source < len(calls):
        raise LoweringError(f"broadcast: source {source}; legal is 0 to {len(calls) - 1}")
    return [calls[source][0][0].clone() for _ in _wanted(calls, members)]


def npu_mm_reduce_scatter_base(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x [size * n, K], weights [K, N], group, size) -> [n, N], the member's part of the sum of products, each rounded to its dtype.

    Source: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mm_reduce_scatter_base.md of Ascend/op-plugin.
    """
    op, products = "npu_mm_reduce_scatter_base", list[Arguments]()
    for (x, weight, group, size), options in calls:
        refuse_options(op, options, reduce_op="sum", comm_mode="aiv")
        if options.get("comm_mode") != "aiv":
            raise LoweringError(f"{op}: comm_mode is {options.get('comm_mode')!r}; legal for inference is 'aiv'")
        rows, columns = require(op, "input", x, FLOATS, (2,)).shape
        require_shape(op, "x2", require(op, "x2", weight, (x.dtype,), (2,)), (columns, weight.shape[1]))
        if not x.is_contiguous() or columns > 65534 or size not in (2, 4, 8):
            raise LoweringError(
                f"{op}: input {(rows, columns)} has strides {x.stride()}, and the group {size} members; legal are rows one behind the "
                "other, fewer than 65535 columns, and 2, 4 or 8 members"
            )
        products.append((((x.float() @ weight.float()).to(x.dtype), "sum", size, group), {}))
    return reduce_scatter_tensor(products, members)


def npu_moe_distribute_dispatch_v2(calls: list[Arguments], members: Sequence[int] | None = None) -> list[tuple[torch.Tensor, ...]]:
    """Sends every token to the members that own its experts; the member index is its rank, whatever ep_rank_id says.

    Each call: (x [T, M], expert_ids int32 [T, X], group, size, rank, experts) and options scales f32 [E, M], x_active_mask bool [T]
    (or [T, X]), expert_scales f32 [T, X], quant_mode 0 or 2, global_bs, expert_token_nums_type 0 or 1.

    Returns:
        for each of `members`, or of all, rows [A, M] by local expert, then by source; f32 scales [A]; int32 assist_info [A*128];
        int64 tokens of each local expert; int32 running sums of rows [experts]; int32 [tp_world_size]; f32 expert scales [A] or [0].
        Rows beyond the received ones are undefined, so are scales without quantisation.
    """
    op = "npu_moe_distribute_dispatch_v2"
    size, experts = calls[0][0][3], calls[0][0][5]
    _same_size(op, size, calls)
    if experts % size:
        raise LoweringError(f"{op}: {experts} experts do not divide by {size} members")
    sent = [_sent(op, args, kwargs, rank) for rank, (args, kwargs) in enumerate(calls)]
    return [_received(op, calls[rank], sent, rank, experts // size) for rank in _wanted(calls, members)]


class _Sent:
    """What one member sends: rows, their scales and where they come from, one per (token, choice)."""

    def __init__(self, rows: torch.Tensor, scales: torch.Tensor, origin: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> None:
        self.rows, self.scales, self.origin, self.expert, self.weight = rows, scales, origin, expert, weight


def _sent(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rank: int) -> _Sent:
    x, ids, experts = args[0], args[1], args[5]
    read = ("scales", "x_active_mask", "expert_scales", "quant_mode", "global_bs", "expert_token_nums_type", "group_tp", "comm_alg")
    refuse_options(op, {k: v for k, v in kwargs.items() if k not in read}, tp_world_size=1, shared_expert_num=1)
    require(op, "x", x, FLOATS, (2,))
    require(op, "expert_ids", ids, (torch.int32,), (2,))
    token, choice = active_choices(op, ids, kwargs.get("x_active_mask")).nonzero(as_tuple=True)
    expert = ids[token, choice].long()
    _check_ids(op, ids[token.unique()], experts, rank)
    rows, mode, smooth = x[token], kwargs.get("quant_mode", 0), kwargs.get("scales")
    scales = undefined(len(rows), dtype=torch.float32)
    if mode == 2:
        rows, scales = _reciprocal_int8(rows.float() if smooth is None else rows.float() * smooth[expert].float())
    elif mode != 0 or smooth is not None:
        raise LoweringError(f"{op}: quant_mode {mode} with scales {smooth is not None}; legal is 0 without scales, or 2")
    origin = torch.stack((torch.full_like(token, rank), token, choice), 1).int()
    weight = kwargs.get("expert_scales")
    weight = undefined(len(rows), dtype=torch.float32) if weight is None else weight[token, choice].float()
    return _Sent(rows, scales, origin, expert, weight)


def active_choices(op: str, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """bool [T, X]: the choices that are dispatched.

    Raises:
        LoweringError: when a mask over tokens is not all true first, then all false.
    """
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    active = require(op, "x_active_mask", mask, (torch.bool,), (1, 2))
    require_shape(op, "x_active_mask", active, ids.shape[: active.dim()])
    if active.dim() == 1 and not torch.equal(active, torch.arange(len(active)) < active.sum()):
        raise LoweringError(f"{op}: x_active_mask is {active.tolist()}; legal is true for the first tokens, then false")
    return active if active.dim() == 2 else active[:, None].expand(ids.shape)


def _check_ids(op: str, ids: torch.Tensor, experts: int, rank: int) -> None:
    ranked = ids.sort(-1).values
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= experts or bool((ranked[:, 1:] == ranked[:, :-1]).any())):
        raise LoweringError(f"{op}: member {rank} has expert_ids {ids.tolist()}; legal are distinct ids from 0 to {experts - 1} a token")


def _reciprocal_int8(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows times 127 / max|row|: this operator multiplies where the other quantising ones divide. Zero rows get scale 0."""
    largest = wide.abs().amax(-1)
    factor = 127.0 / torch.where(largest == 0, 1.0, largest)
    return to_int8(wide * factor[:, None]), torch.where(largest == 0, 0.0, 1.0 / factor)


def _received(op: str, call: Arguments, sent: list[_Sent], rank: int, local: int) -> tuple[torch.Tensor, ...]:
    (_, ids, *_), kwargs = call
    X, size = ids.shape[1], len(sent)
    tokens = kwargs.get("global_bs", 0) or ids.shape[0] * size
    capacity = tokens * min(local, X)
    picks = [[(s.expert == rank * local + e).nonzero()[:, 0] for s in sent] for e in range(local)]
    counts = torch.tensor([[len(pick) for pick in row] for row in picks])

    def gathered(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([value[pick] for row in picks for value, pick in zip(values, row, strict=True)])

    def padded(values: list[torch.Tensor]) -> torch.Tensor:
        rows = gathered(values)
        if len(rows) > capacity:
            raise LoweringError(f"{op}: member {rank} receives {len(rows)} rows; {tokens} tokens make room for {capacity}")
        whole = undefined(capacity, *rows.shape[1:], dtype=rows.dtype)
        whole[: len(rows)] = rows
        return whole

    rows = padded([s.rows for s in sent])
    assist = undefined(max(ids.numel(), capacity * ASSIST), dtype=torch.int32)
    origin = gathered([s.origin for s in sent])
    assist[: capacity * ASSIST].view(capacity, ASSIST)[: len(origin), :3] = origin
    nums = counts.sum(1) if kwargs.get("expert_token_nums_type", 1) == 1 else counts.sum(1).cumsum(0)
    ends = counts.flatten().cumsum(0).int()
    weights = torch.empty(0)
    if kwargs.get("expert_scales") is not None:
        extra = undefined(tokens * 2 * X * (size // 8), dtype=torch.int32)
        ends, weights = torch.cat((ends, extra)), padded([s.weight for s in sent])
    return rows, padded([s.scales for s in sent]), assist, nums, ends, undefined(kwargs.get("tp_world_size", 0), dtype=torch.int32), weights


def npu_moe_distribute_combine_v2(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Sends every row back to its token: out[t] = sum over x of expert_scales[t, x] * row(t, x) + shared_expert_x, in float32.

    Each call: (rows [A, M], expert_ids int32 [T, X], assist_info, ep_send_counts, expert_scales f32 [T, X], group, size, rank,
    experts) with the third and fourth as dispatch gave them, and options x_active_mask and shared_expert_x [T, M].

    Returns:
        [T, M] like the rows for each of `members`, or of all; inactive tokens are undefined.

    Raises:
        LoweringError: also when a token's row does not come back exactly once.
    """
    op = "npu_moe_distribute_combine_v2"
    _same_size(op, calls[0][0][6], calls)
    returned = [_returned(op, args) for args, _ in calls]
    return [_combined(op, *calls[rank], returned, rank) for rank in _wanted(calls, members)]


def _returned(op: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, M] that one member sends back and their (rank, token, choice) [N, 3]."""
    rows, _, assist, ends, _, _, size, _, experts = args
    require(op, "expand_x", rows, FLOATS, (2,))
    require(op, "assist_info_for_combine", assist, (torch.int32,), (1,))
    count = int(require(op, "ep_send_counts", ends, (torch.int32,), (1,))[experts // size * size - 1])
    return rows[:count], assist[: count * ASSIST].view(count, ASSIST)[:, :3].long()


def _combined(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: list[tuple[torch.Tensor, torch.Tensor]], rank: int
) -> torch.Tensor:
    ids, weights = args[1], require(op, "expert_scales", args[4], (torch.float32,), (2,))
    read = ("x_active_mask", "shared_expert_x", "tp_send_counts", "expand_scales", "global_bs", "group_tp", "comm_alg")
    refuse_options(op, {k: v for k, v in kwargs.items() if k not in read}, tp_world_size=1, shared_expert_num=1)
    require_shape(op, "expert_scales", weights, ids.shape)
    active = active_choices(op, ids, kwargs.get("x_active_mask"))
    returns = torch.zeros_like(ids)
    out = torch.zeros(ids.shape[0], args[0].shape[1])
    for rows, origin in returned:
        mine = origin[:, 0] == rank
        token, choice = origin[mine, 1], origin[mine, 2]
        returns.index_put_((token, choice), torch.ones_like(token, dtype=ids.dtype), accumulate=True)
        out.index_add_(0, token, rows[mine].float() * weights[token, choice, None])
    if not torch.equal(returns, active.to(returns.dtype)):
        raise LoweringError(f"{op}: rows back at member {rank}: {returns.tolist()}; legal is one for each active choice, {active.tolist()}")
    if (shared := kwargs.get("shared_expert_x")) is not None:
        out = out + shared.reshape(out.shape).float()
    out[~active.any(1)] = float("nan")
    return out.to(args[0].dtype)
