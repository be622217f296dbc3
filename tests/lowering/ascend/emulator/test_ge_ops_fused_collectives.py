"""GE's fused operators call the kernels with what their attributes say, and refuse what has no meaning there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.ge_ops_common import Call, GeOp
from npucompile.lowering.ascend.emulator.ge_ops_fused_collectives import FUSED_TOGETHER

ATTRS: dict[str, dict[str, Any]] = {
    "MatmulReduceScatter": {"reduce_op": "sum", "rank_size": 2},
    "MatmulAllReduce": {"reduce_op": "sum", "comm_mode": "ai_cpu", "y_dtype": 28, "group_size": 0, "comm_quant_mode": 0},
    "AllGatherMatmul": {"gather_index": 0, "is_gather_out": True, "rank_size": 2},
}
COMMON = {"group": "tp", "is_trans_a": False, "is_trans_b": True, "comm_turn": 0}
XS = [torch.arange(24.0).view(4, 6) + r for r in range(2)]
WS = [torch.arange(18.0).view(3, 6) % 5 - r for r in range(2)]
SUM = XS[0] @ WS[0].t() + XS[1] @ WS[1].t()


def results(kind: str, weights: list[torch.Tensor], bias: torch.Tensor | None = None, **attrs: Any) -> list[Any]:
    op = GeOp("one", kind, ("x:0", "w:0", "b:0"), ("x1", "x2", "bias"), (), COMMON | ATTRS[kind] | attrs, ("",))
    calls = [Call(op, [x, w, bias]) for x, w in zip(XS, weights, strict=True)]
    found = FUSED_TOGETHER[kind](calls)
    for call in calls:
        call.finish()
    return found


@pytest.mark.parametrize("turned", [True, False])
def test_weights_either_way(turned: bool) -> None:
    weights = WS if turned else [w.t().contiguous() for w in WS]
    assert torch.equal(torch.cat(results("MatmulReduceScatter", weights, is_trans_b=turned)), SUM)
    assert all(torch.equal(y, SUM) for y in results("MatmulAllReduce", weights, is_trans_b=turned))
    for r, (y, whole) in enumerate(results("AllGatherMatmul", weights, is_trans_b=turned)):
        assert torch.equal(whole, torch.cat(XS))
        assert torch.equal(y, torch.cat(XS) @ WS[r].t())


def test_without_what_was_gathered() -> None:
    assert [whole.numel() for _, whole in results("AllGatherMatmul", WS, is_gather_out=False)] == [0, 0]


@pytest.mark.parametrize(
    ("kind", "attrs", "said"),
    [
        ("MatmulReduceScatter", {"reduce_op": "max"}, "reduce_op is 'max'"),
        ("MatmulReduceScatter", {"is_trans_a": True}, "is_trans_a is True"),
        ("MatmulReduceScatter", {"rank_size": 4}, "the node says 4 members"),
        ("MatmulAllReduce", {"comm_turn": 2}, "comm_turn is 2"),
        ("MatmulAllReduce", {"antiquant_group_size": 32}, "antiquant_group_size is 32"),
        ("AllGatherMatmul", {"gather_index": 1}, "gather_index is 1"),
        ("AllGatherMatmul", {"block_size": 1}, "has block_size, which the interpreter does not know"),
    ],
)
def test_refused(kind: str, attrs: dict[str, Any], said: str) -> None:
    with pytest.raises(LoweringError, match=said):
        results(kind, WS, **attrs)


@pytest.mark.parametrize("kind", ATTRS)
def test_a_bias_is_refused(kind: str) -> None:
    with pytest.raises(LoweringError, match="has bias; the interpreter knows it without"):
        results(kind, WS, torch.zeros(3))
