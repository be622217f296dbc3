"""lowering/ascend/operators/exchange.py: rows beyond those received are undefined; calls that the device would misread are refused.

test_ge_moe.py compares both kernels with the primitives' references.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import exchange
from npucompile.lowering.ascend.operators.node import Node


class Exchange:
    """Three tokens with three of eight experts on each of four members."""

    def __init__(self) -> None:
        self.x = [torch.randn(3, 6) for _ in range(4)]
        self.ids = [torch.stack([torch.randperm(8)[:3] for _ in range(3)]).int() for _ in range(4)]
        self.weights = [torch.rand(3, 3) for _ in range(4)]

    def dispatch(self, experts: int = 8, **options: Any) -> list[tuple[torch.Tensor, ...]]:
        calls = [((x, ids, "world", 4, 0, experts), options) for x, ids in zip(self.x, self.ids, strict=True)]
        return exchange.npu_moe_distribute_dispatch_v2(calls)

    def combine(self, sent: list[tuple[torch.Tensor, ...]], **options: Any) -> list[torch.Tensor]:
        ranks = zip(sent, self.ids, self.weights, strict=True)
        calls = [((rows, ids, assist, ends, shares, "world", 4, 0, 8), options) for (rows, _, assist, _, ends, *_), ids, shares in ranks]
        return exchange.npu_moe_distribute_combine_v2(calls)


@pytest.mark.parametrize("quant_mode", [0, 2])
def test_rows_beyond_those_received_are_undefined(quant_mode: int) -> None:
    tokens = Exchange()
    tokens.x[0][1] = 0
    for rows, scales, assist, counts, ends, *_ in tokens.dispatch(quant_mode=quant_mode):
        live = int(counts.sum())
        assert (live, live < len(rows)) == (int(ends[-1]), True)
        assert (rows[live:] == -128).all() if quant_mode else rows[live:].isnan().all()
        assert scales[live if quant_mode else 0 :].isnan().all()
        assert (assist[live * exchange.ASSIST :] == torch.iinfo(torch.int32).min).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_mode": 3}, "quant_mode 3; legal is 0 or 2"),
        ({"shared_expert_rank_num": 1}, "shared_expert_rank_num=1"),
        ({"expert_token_nums_type": 0}, "expert_token_nums_type is 0; legal is 1"),
        ({"x_active_mask": torch.ones(3, dtype=torch.bool)}, "x_active_mask=tensor"),
        ({"experts": 6}, "6 experts do not divide by 4 members"),
        ({"experts": 4}, "member 0 has expert_ids .*; legal are distinct ids from 0 to 3 a token"),
    ],
)
def test_dispatch_refuses(options: dict[str, Any], message: str) -> None:
    tokens = Exchange()
    tokens.ids[0][1] = torch.tensor([5, 6, 7])
    with pytest.raises(LoweringError, match=message):
        tokens.dispatch(**options)


def test_an_expert_that_a_token_has_twice_is_refused() -> None:
    tokens = Exchange()
    tokens.ids[2][1] = torch.tensor([1, 2, 1])
    with pytest.raises(LoweringError, match="member 2 has expert_ids"):
        tokens.dispatch()


def test_combine_refuses_rows_of_another_dispatch() -> None:
    tokens = Exchange()
    sent, strange = tokens.dispatch(), Exchange().dispatch()
    with pytest.raises(LoweringError, match=r"rows back at member 0: .*; legal is one for each choice"):
        tokens.combine([sent[0], strange[0], sent[2], sent[3]])
    with pytest.raises(LoweringError, match="x_active_mask=tensor"):
        tokens.combine(sent, x_active_mask=torch.ones(3, dtype=torch.bool))
    tokens.weights[0] = tokens.weights[0].bfloat16()
    with pytest.raises(LoweringError, match="expert_scales is"):
        tokens.combine(sent)


@pytest.mark.parametrize(
    ("ranks", "shared", "most", "message"),
    [
        (16, 0, 2048, "None"),
        (17, 1, 2048, "None"),
        (15, 0, 2048, "divides 512 experts among 15 ranks"),
        (16, 0, 256, "512 in all; legal are up to 256"),
    ],
)
def test_experts_of_a_rank(ranks: int, shared: int, most: int, message: str) -> None:
    attributes = {"ep_world_size": ranks, "moe_expert_num": 512, "shared_expert_rank_num": shared}
    assert message in str(exchange.experts_of_a_rank(Node("n", "MoeDistributeDispatchV2", attributes=attributes), {}, most=most))
