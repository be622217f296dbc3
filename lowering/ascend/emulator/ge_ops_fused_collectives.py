"""Turns GE's products that are fused with a collective into functions of all members of a group at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....graphs.errors import LoweringError
from . import kernels_fused as fused
from .ge_ops_common import Call, Results, Together
from .kernels_group import Call as Member

_UNQUANTISED = {"antiquant_group_size": 0, "comm_quant_mode": 0, "group_size": 0, "y_dtype": 28}
_ABSENT = ("x3", "antiquant_scale", "antiquant_offset", "dequant_scale", "pertoken_scale", "comm_quant_scale_1", "comm_quant_scale_2")


def _matmul_reduce_scatter(calls: list[Call]) -> list[Results]:
    for call in calls:
        call.legal(reduce_op="sum")
    return [*fused.npu_mm_reduce_scatter_base([((*_operands(call), call.attr("rank_size")), {}) for call in calls])]


def _matmul_all_reduce(calls: list[Call]) -> list[Results]:
    for call in calls:
        call.legal(reduce_op="sum", **_UNQUANTISED)
        call.ignore("comm_mode")
    return [*fused.npu_mm_all_reduce_base([(_operands(call, *_ABSENT), {}) for call in calls])]


def _all_gather_matmul(calls: list[Call]) -> list[Results]:
    members: list[Member] = []
    for call in calls:
        call.legal(gather_index=0)
        members.append(((*_operands(call), call.attr("rank_size")), {"gather_output": call.attr("is_gather_out", True)}))
    return [*fused.npu_all_gather_base_mm(members)]


def _operands(call: Call, *absent: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    call.legal(is_trans_a=False, comm_turn=0)
    if present := [name for name in ("bias", *absent) if call.held(name) is not None]:
        raise LoweringError(f"{call.op} has {', '.join(present)}; the interpreter knows it without")
    x2 = call.tensor("x2")
    return call.tensor("x1"), x2.t() if call.attr("is_trans_b", False) else x2, call.attr("group")


FUSED_TOGETHER: Mapping[str, Together] = {
    "MatmulReduceScatter": _matmul_reduce_scatter,
    "MatmulAllReduce": _matmul_all_reduce,
    "AllGatherMatmul": _all_gather_matmul,
}
"""Functions of a whole group by type of operator: one call per member in rank order, one result each."""
