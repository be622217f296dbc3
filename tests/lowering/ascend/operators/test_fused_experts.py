"""lowering/ascend/operators/fused_experts.py: the kernel computes what the primitive does, and refuses what it would misread."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npucompile.graphs import ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.quantise import quantise_w4
from npucompile.lowering.ascend.operators.fused_experts import dispatch_ffn_combine_w4a8

T, M, F, X, LOCAL = 24, 64, 32, 3, 2


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network(ranks: int, tokens: int = T) -> list[tuple[Any, ...]]:
    """Each rank's operands of the primitive; ranks have experts and tokens of their own."""
    calls = []
    for rank in range(ranks):
        x = draw(tokens, M, seed=rank)
        ids = draw(tokens, LOCAL * ranks, seed=10 + rank).argsort(-1)[:, : min(X, LOCAL * ranks)].int()
        up, down = draw(LOCAL, M, 2 * F, seed=20 + rank) * M**-0.5, draw(LOCAL, F, M, seed=30 + rank) * F**-0.5
        weights = draw(*ids.shape, seed=40 + rank).softmax(-1)
        first = torch.tensor([rank], dtype=torch.int32)
        calls.append((x, ids, weights, x, *quantise_w4(up), *quantise_w4(down), first, LOCAL * ranks, "world", ranks))
    return calls


def as_kernel(call: tuple[Any, ...], room: int = 10**6) -> tuple[Any, ...]:
    x, ids, weights, _, up, up_scale, up_assist, down, down_scale, down_assist, _, _, _, ranks = call
    scales = up_scale.flatten(1), down_scale.flatten(1)
    return x, up, down, ids, *scales, up_assist, down_assist, weights, "fused_experts", ranks, room


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_kernel_is_the_primitive(ranks: int) -> None:
    calls = network(ranks)
    want = ops.fused_experts_w4a8.rule("group_reference")(calls)
    got = dispatch_ffn_combine_w4a8([(as_kernel(call), {}) for call in calls])
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(dispatch_ffn_combine_w4a8([(as_kernel(call), {}) for call in calls], [1])[0], got[1])


def test_halves_of_products_are_rounded_where_activations_are_narrow() -> None:
    calls = [(call[0].bfloat16(), *call[1:3], call[3].bfloat16(), *call[4:]) for call in network(2)]
    want = ops.fused_experts_w4a8.rule("group_reference")(calls)
    for mine, theirs in zip(dispatch_ffn_combine_w4a8([(as_kernel(call), {}) for call in calls]), want, strict=True):
        assert mine.dtype == torch.bfloat16
        assert 0 < (mine.float() - theirs.float()).norm() < 0.01 * theirs.float().norm()


def test_rows_beyond_the_room_are_lost() -> None:
    calls = network(2)
    rows = sum(int((call[1] < LOCAL).sum()) for call in calls)
    whole, short = (dispatch_ffn_combine_w4a8([(as_kernel(call, room), {}) for call in calls]) for room in (rows, rows - 1))
    lost = torch.cat(short).isnan().any(-1)
    assert not torch.cat(whole).isnan()[~lost].any()
    assert lost.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 23}, "23 tokens; legal are at least 24"),
        ({5: torch.ones(LOCAL, M, dtype=torch.int32)}, "scale2"),
        ({10: 4}, "4 members and 1000000 rows, the group of this mesh has 2"),
        ({3: torch.full((T, X), 4, dtype=torch.int32)}, "legal are 0 to 3"),
    ],
)
def test_calls_that_the_kernel_would_misread(change: dict[Any, Any], message: str) -> None:
    calls = [list(as_kernel(call)) for call in network(2, change.pop("tokens", T))]
    for call in calls:
        for position, value in change.items():
            call[position] = value
    with pytest.raises(LoweringError, match=message):
        dispatch_ffn_combine_w4a8([(tuple(call), {}) for call in calls])
