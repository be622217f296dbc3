"""GE's communication operators as functions over all members of a group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from ....graphs.errors import LoweringError
from ..collectives import REDUCTIONS
from ..ge_file import GROUPS
from . import kernels_group as group
from .ge_ops_common import Call, GroupFunction, Results

Members = list[group.Arguments]
_TORCH_REDUCTIONS = {ge: name for name, ge in REDUCTIONS.items()}


def group_of(call: Call) -> str:
    """The symbolic group over which an operator of `GROUP_FUNCTIONS` communicates.

    Raises:
        LoweringError: it names none.
    """
    name = call.attr("group_ep" if call.op.type.startswith("Moe") else "group")
    if not name:
        raise LoweringError(f"{call.op} names no group; legal is one of {', '.join(GROUPS)}")
    return str(name)


def _reduction(call: Call) -> str:
    how = call.attr("reduction")
    if how not in _TORCH_REDUCTIONS:
        raise LoweringError(f"{call.op}: attribute reduction is {how!r}; legal are {sorted(_TORCH_REDUCTIONS)}")
    return _TORCH_REDUCTIONS[how]


def _all_reduce(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    return [*group.all_reduce([((call.tensor("x"), _reduction(call), ""), {}) for call in _unfused(calls)], wanted)]


def _all_gather(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    return [*group.all_gather_into_tensor([((call.tensor("x"), call.attr("rank_size"), ""), {}) for call in _unfused(calls)], wanted)]


def _reduce_scatter(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    members: Members = [((call.tensor("x"), _reduction(call), call.attr("rank_size"), ""), {}) for call in _unfused(calls)]
    return [*group.reduce_scatter_tensor(members, wanted)]


def _unfused(calls: list[Call]) -> list[Call]:
    """Ignores the fusion attributes, which merge the transfers of several operators without changing a result."""
    for call in calls:
        call.ignore("fusion", "fusion_id")
    return calls


def _all_to_all(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    rows, members = calls[0].tensor("x").shape[0], len(calls)
    if rows % members:
        raise LoweringError(f"{calls[0].op}: {rows} rows for {members} members; legal are equal parts")
    parts = [rows // members] * members
    return [*group.all_to_all_single([((call.tensor("x"), parts, parts, ""), {}) for call in calls], wanted)]


def _all_to_all_v(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    """Counts and displacements are in elements; the parts lie side by side, as whole rows."""
    members: Members = []
    for call in calls:
        x = call.tensor("send_data")
        row = max(1, math.prod(x.shape[1:]))
        sent, received = (_rows(call, side, row) for side in ("send", "recv"))
        members.append(((x, received, sent, ""), {}))
    return [*group.all_to_all_single(members, wanted)]


def _rows(call: Call, side: str, row: int) -> list[int]:
    counts, offsets = call.integers(f"{side}_counts"), call.integers(f"{side}_displacements")
    if offsets != [0, *itertools.accumulate(counts)][:-1] or any(count % row for count in counts):
        raise LoweringError(f"{call.op}: {side} counts {counts} at {offsets} of rows of {row}; legal are whole rows side by side")
    return [count // row for count in counts]


def _broadcast(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    return [*group.broadcast([((call.tensor("x0"), call.attr("root_rank"), ""), {}) for call in _unfused(calls)], wanted)]


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
    return [*group.npu_moe_distribute_dispatch_v2(members, wanted)]


def _options(**more: int) -> dict[str, int | str]:
    return {"group_tp": "", "tp_world_size": 0, "shared_expert_num": 1, "global_bs": 0, "comm_alg": "", **more}


_COMBINED = ("expand_x", "expert_ids", "assist_info_for_combine", "ep_send_counts", "expert_scales")


def _combine(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    members: Members = []
    for call in calls:
        call.expect(tp_rank_id=0, out_dtype=0, comm_quant_mode=0, group_list_type=0, **_MOE_DEFAULTS)
        options = {slot: call.optional(slot) for slot in ("tp_send_counts", "x_active_mask", "expand_scales", "shared_expert_x")}
        options |= {name: call.attr(name, default) for name, default in _options().items()}
        members.append(((*map(call.tensor, _COMBINED), group_of(call), *map(call.attr, _MOE_ATTRS)), options))
    return [*group.npu_moe_distribute_combine_v2(members, wanted)]


GROUP_FUNCTIONS: Mapping[str, GroupFunction] = {
    "HcomAllReduce": _all_reduce,
    "HcomAllGather": _all_gather,
    "HcomReduceScatter": _reduce_scatter,
    "HcomAllToAll": _all_to_all,
    "HcomAllToAllV": _all_to_all_v,
    "HcomBroadcast": _broadcast,
    "MoeDistributeDispatchV2": _dispatch,
    "MoeDistributeCombineV2": _combine,
}
"""Functions of a whole group by type of operator: one call per member in rank order, one result for each or for those wanted."""
