"""The exchange of tokens with experts on other ranks: dispatch and combine.

Kernels take the calls of all members of a group and compute the results of the members that are named, or of all. Semantics: the operator
documentation of Ascend/op-plugin.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....graphs import ordering
from ....graphs.errors import LoweringError
from ....graphs.quantise import rounded_in_blocks
from ....graphs.types import DISPATCH
from . import work
from .call import Call, Results, group_of
from .checks import FLOATS, refuse_options, require, require_shape, to_int8, undefined
from .collectives import Members, behind, check_size, remember, wanted_members
from .node import Node
from .record import COUNTS, Arguments, NpuOperator, TokenList, TorchForm
from .trials import Trial
from .value_rules import Index

# Integers in a row of assist_info; the real operator does not document their layout.
ASSIST = 128
# What both take besides what the kernels read, where it changes no result.
_LEGAL = {"tp_world_size": 1, "shared_expert_num": 1}


@dataclass(frozen=True)
class _Sent:
    """What one member sends: rows, their scales, where they come from and the expert that they go to, one per (token, choice)."""

    rows: torch.Tensor
    scales: torch.Tensor
    origin: torch.Tensor
    expert: torch.Tensor


def npu_moe_distribute_dispatch_v2(calls: list[Arguments], members: Sequence[int] | None = None) -> list[tuple[torch.Tensor, ...]]:
    """Sends every token to the members that own its experts; the member index is its rank, whatever ep_rank_id says.

    Each call: (x [T, M], expert_ids int32 [T, X], group, size, rank, experts) and options quant_mode 0 or 2, expert_token_nums_type 1.

    Returns:
        for each of `members`, or of all, rows [A, M] by local expert, then by source; f32 scales [A]; int32 assist_info [A*128];
        int64 tokens of each local expert; int32 running sums of rows [experts]; int32 [tp_world_size]; and nothing, for scales of experts.
        Rows beyond the received ones are undefined, so are scales without quantisation.
    """
    op = "npu_moe_distribute_dispatch_v2"
    size, experts = calls[0][0][3], calls[0][0][5]
    check_size(op, size, calls)
    if experts % size:
        raise LoweringError(f"{op}: {experts} experts do not divide by {size} members")
    sent = [_sent(op, args, kwargs, rank) for rank, (args, kwargs) in enumerate(calls)]
    return [_received(calls[rank], sent, rank, experts // size) for rank in wanted_members(calls, members)]


def _sent(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rank: int) -> _Sent:
    x, ids, experts = args[0], args[1], args[5]
    read = ("quant_mode", "expert_token_nums_type", "group_tp", "comm_alg")
    refuse_options(op, {name: value for name, value in kwargs.items() if name not in read}, **_LEGAL)
    if (kind := kwargs.get("expert_token_nums_type", 1)) != 1:
        raise LoweringError(f"{op}: expert_token_nums_type is {kind}; legal is 1, counts")
    require(op, "x", x, FLOATS, (2,))
    _check_ids(op, require(op, "expert_ids", ids, (torch.int32,), (2,)), experts, rank)
    token, choice = torch.ones_like(ids).nonzero(as_tuple=True)
    rows, mode = x[token], kwargs.get("quant_mode", 0)
    scales = undefined(len(rows), dtype=torch.float32)
    if mode == 2:
        rows, scales = _reciprocal_int8(rows.float())
    elif mode != 0:
        raise LoweringError(f"{op}: quant_mode {mode}; legal is 0 or 2")
    return _Sent(rows, scales, torch.stack((torch.full_like(token, rank), token, choice), 1).int(), ids.flatten().long())


def _check_ids(op: str, ids: torch.Tensor, experts: int, rank: int) -> None:
    ranked = ids.sort(-1).values
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= experts or bool((ranked[:, 1:] == ranked[:, :-1]).any())):
        raise LoweringError(f"{op}: member {rank} has expert_ids {ids.tolist()}; legal are distinct ids from 0 to {experts - 1} a token")


def _reciprocal_int8(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows times 127 / max|row|: this operator multiplies where the other quantising ones divide. Zero rows get scale 0."""
    largest = wide.abs().amax(-1)
    factor = 127.0 / torch.where(largest == 0, 1.0, largest)
    return to_int8(wide * factor[:, None]), torch.where(largest == 0, 0.0, 1.0 / factor)


def _received(call: Arguments, sent: list[_Sent], rank: int, local: int) -> tuple[torch.Tensor, ...]:
    (_, ids, *_), kwargs = call
    capacity = ids.shape[0] * len(sent) * min(local, ids.shape[1])
    picks = [[(s.expert == rank * local + e).nonzero()[:, 0] for s in sent] for e in range(local)]
    counts = torch.tensor([[len(pick) for pick in row] for row in picks])

    def gathered(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([value[pick] for row in picks for value, pick in zip(values, row, strict=True)])

    def padded(values: list[torch.Tensor]) -> torch.Tensor:
        rows = gathered(values)
        whole = undefined(capacity, *rows.shape[1:], dtype=rows.dtype)
        whole[: len(rows)] = rows
        return whole

    assist = undefined(max(ids.numel(), capacity * ASSIST), dtype=torch.int32)
    origin = gathered([s.origin for s in sent])
    assist[: capacity * ASSIST].view(capacity, ASSIST)[: len(origin), :3] = origin
    ends, others = counts.flatten().cumsum(0).int(), undefined(kwargs.get("tp_world_size", 0), dtype=torch.int32)
    rows, scales = padded([s.rows for s in sent]), padded([s.scales for s in sent])
    return rows, scales, assist, counts.sum(1), ends, others, torch.empty(0)


def npu_moe_distribute_combine_v2(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """Sends every row back to its token: out[t] = sum over x of expert_scales[t, x] * row(t, x) + shared_expert_x, in float32.

    Each call: (rows [A, M], expert_ids int32 [T, X], assist_info, ep_send_counts, expert_scales f32 [T, X], group, size, rank,
    experts) with the third and fourth as dispatch gave them, and options shared_expert_x [T, M] and comm_quant_mode, 2 to send int8.

    Returns:
        [T, M] like the rows for each of `members`, or of all.

    Raises:
        LoweringError: also when a token's row does not come back exactly once.
    """
    op = "npu_moe_distribute_combine_v2"
    check_size(op, calls[0][0][6], calls)
    returned = [_returned(op, args, kwargs.get("comm_quant_mode", 0)) for args, kwargs in calls]
    rows, origin = (torch.cat(parts) for parts in zip(*returned, strict=True))
    return [_combined(op, *calls[rank], rows, origin, rank) for rank in wanted_members(calls, members)]


def _returned(op: str, args: tuple[Any, ...], mode: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, M] that one member sends back, as they arrive, and their (rank, token, choice) [N, 3]."""
    rows, _, assist, ends, _, _, size, _, experts = args
    require(op, "expand_x", rows, FLOATS, (2,))
    require(op, "assist_info_for_combine", assist, (torch.int32,), (1,))
    count = int(require(op, "ep_send_counts", ends, (torch.int32,), (1,))[experts // size * size - 1])
    if mode not in (0, 2):
        raise LoweringError(f"{op}: comm_quant_mode {mode}; legal is 0 or 2")
    return rounded_in_blocks(rows[:count]) if mode else rows[:count], assist[: count * ASSIST].view(count, ASSIST)[:, :3].long()


def _combined(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: torch.Tensor, origin: torch.Tensor, rank: int
) -> torch.Tensor:
    ids, weights = args[1], require(op, "expert_scales", args[4], (torch.float32,), (2,))
    read = ("shared_expert_x", "tp_send_counts", "expand_scales", "group_tp", "comm_alg", "comm_quant_mode")
    refuse_options(op, {name: value for name, value in kwargs.items() if name not in read}, **_LEGAL)
    require_shape(op, "expert_scales", weights, ids.shape)
    mine = origin[:, 0] == rank
    token, choice = origin[mine, 1], origin[mine, 2]
    returns = torch.zeros_like(ids).index_put_((token, choice), torch.ones_like(token, dtype=ids.dtype), accumulate=True)
    if not (returns == 1).all():
        raise LoweringError(f"{op}: rows back at member {rank}: {returns.tolist()}; legal is one for each choice")
    out = torch.zeros(ids.shape[0], args[0].shape[1]).index_add_(0, token, rows[mine].float() * weights[token, choice, None])
    if (shared := kwargs.get("shared_expert_x")) is not None:
        out = out + shared.reshape(out.shape).float()
    return out.to(args[0].dtype)


_MOE_DEFAULTS = {"expert_shard_type": 0, "shared_expert_rank_num": 0, "zero_expert_num": 0, "copy_expert_num": 0, "const_expert_num": 0}
_MOE_ATTRS = ("ep_world_size", "ep_rank_id", "moe_expert_num")
_DISPATCHED = ("scales", "x_active_mask", "expert_scales")
# Legal `y_dtype` of dispatched rows by quant_mode and dtype of x.
_DISPATCHED_DTYPES: Mapping[int, Mapping[torch.dtype, int]] = {
    0: {torch.float32: 0, torch.float16: 1, torch.bfloat16: 27},
    2: {torch.float32: 2, torch.float16: 2, torch.bfloat16: 2},
}


def _dispatch(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    members: Members = []
    for call in calls:
        call.expect(tp_rank_id=0, **_MOE_DEFAULTS)
        x, mode = call.tensor("x"), call.attr("quant_mode", 0)
        if (legal := _DISPATCHED_DTYPES.get(mode, {}).get(x.dtype)) is None or call.attr("y_dtype", 28) not in (legal, 28):
            raise LoweringError(f"{call.op}: {x.dtype} with quant_mode {mode} as dtype number {call.attr('y_dtype')}; legal is {legal}")
        options = {slot: call.optional(slot) for slot in _DISPATCHED}
        options |= {name: call.attr(name, default) for name, default in _options(expert_token_nums_type=1).items()}
        args = (x, call.tensor("expert_ids"), group_of(call), *map(call.attr, _MOE_ATTRS))
        members.append((args, options | {"quant_mode": mode}))
    return [*npu_moe_distribute_dispatch_v2(members, wanted)]


def _options(**more: int) -> dict[str, int | str]:
    return {"group_tp": "", "tp_world_size": 0, "shared_expert_num": 1, "global_bs": 0, "comm_alg": "", **more}


_COMBINED = ("expand_x", "expert_ids", "assist_info_for_combine", "ep_send_counts", "expert_scales")


def _combine(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    members: Members = []
    for call in calls:
        call.expect(tp_rank_id=0, out_dtype=0, group_list_type=0, **_MOE_DEFAULTS)
        options = {slot: call.optional(slot) for slot in ("tp_send_counts", "x_active_mask", "expand_scales", "shared_expert_x")}
        options |= {name: call.attr(name, default) for name, default in _options(comm_quant_mode=0).items()}
        members.append(((*map(call.tensor, _COMBINED), group_of(call), *map(call.attr, _MOE_ATTRS)), options))
    return [*npu_moe_distribute_combine_v2(members, wanted)]


def _convert_after(ta: Any, earlier: Any) -> Any:
    """No operator: the tensor, which remembers what must come first."""
    return lambda x, first, meta_outputs=None: remember(x, first)


def _convert_exchange(ta: Any, earlier: Any) -> Any:
    return lambda x, *args, **kwargs: behind(x, earlier(x, *args, **kwargs))


_ROUNDED_SHARE = 10 / 16
"""Eight values of 16 bits as eight int8 and a scale of 16 bits."""


def _exchange_work(op: Node, facts: work.Facts, kind: str) -> work.Work:
    """A row a token and chosen expert; the busiest rank decides."""
    ids = facts.types[op.tensor("expert_ids")]
    rows = facts.types[op.tensor("x") if kind == "dispatch" else op.tensor("expand_x")]
    sent = facts.types[f"{op.name}:0"] if kind == "dispatch" else rows
    ranks = op.attributes["ep_world_size"]
    nbytes = ids.elements * sent.nbytes / max(sent.shape[0], 1) * (ranks - 1) / ranks
    if op.attributes.get("comm_quant_mode"):
        nbytes *= _ROUNDED_SHARE
    return work.Work(sent_bytes=nbytes * facts.expert_imbalance, group=op.group, exchange=kind)


def _dispatched_rows(op: Node, types: Mapping[str, Any], ranks: int) -> work.Rows:
    choices, ep, experts = types[op.input[1]].elements, op.attributes["ep_world_size"], op.attributes["moe_expert_num"]
    return work.Rows(choices, choices * ep, experts // ep, experts)


def experts_of_a_rank(node: Node, options: Mapping[str, str], most: int) -> str | None:
    """Experts divide among the ranks that have some, and experts of a rank times ranks are at most `most`."""
    ranks, experts = node.attributes.get("ep_world_size", 0), node.attributes.get("moe_expert_num", 0)
    ranks -= node.attributes.get("shared_expert_rank_num", 0)
    if ranks <= 0 or experts % ranks:
        return f"divides {experts} experts among {ranks} ranks; legal is a multiple of the ranks"
    if (slots := experts // ranks * node.attributes["ep_world_size"]) > most:
        return f"has {experts // ranks} experts on each of {ranks} ranks, {slots} in all; legal are up to {most}"
    return None


_EXPERT_IDS = Index("expert_ids", lambda arguments: arguments["moe_expert_num"])


def _exchange(kinds: str, collective: str, form: TorchForm, **more: Any) -> NpuOperator:
    """An operator of the experts' own group: tokens go to their experts, or come back."""
    return NpuOperator(
        tuple(kinds.split()),
        torch=(form,),
        trial=Trial(wrong="expert-exchange"),
        collective=collective,
        own_group=DISPATCH,
        exchange="expert dispatch and combine",
        rules=(experts_of_a_rank,),
        **more,
    )


OPERATORS = (
    _exchange(
        "MoeDistributeDispatch MoeDistributeDispatchV2 MoeDistributeDispatchV3",
        "moe_dispatch",
        TorchForm(
            "npu.npu_moe_distribute_dispatch_v2.default",
            index=_EXPERT_IDS,
            group_kernel=npu_moe_distribute_dispatch_v2,
            group=(2, "group_ep"),
            size=3,
            rank=4,
        ),
        converters={
            "npu.npu_moe_distribute_dispatch_v2.default": _convert_exchange,
            f"{ordering.NAMESPACE}.after.default": _convert_after,
        },
        run_group=_dispatch,
        work=functools.partial(_exchange_work, kind="dispatch"),
        routed=_dispatched_rows,
        gives_tokens=TokenList(3, "expert_token_nums_type", COUNTS),
    ),
    _exchange(
        "MoeDistributeCombine MoeDistributeCombineV2 MoeDistributeCombineV3",
        "moe_combine",
        TorchForm(
            "npu.npu_moe_distribute_combine_v2.default",
            index=_EXPERT_IDS,
            group_kernel=npu_moe_distribute_combine_v2,
            group=(5, "group_ep"),
            size=6,
            rank=7,
        ),
        converters={"npu.npu_moe_distribute_combine_v2.default": _convert_exchange},
        run_group=_combine,
        work=functools.partial(_exchange_work, kind="combine"),
    ),
    _exchange(
        "MoeDistributeCombineAddRmsNorm",
        "moe_combine",
        TorchForm("npu.npu_moe_distribute_combine_add_rms_norm.default", group=(7, "group_ep"), size=8, rank=9),
    ),
)
