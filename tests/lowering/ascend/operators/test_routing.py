"""lowering/ascend/operators/routing.py: the choice of experts equals plain loops."""

import math
from typing import Any

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import routing as kernels

FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    step = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), wanted.double(), rtol=step, atol=step * 0.2)


@pytest.mark.parametrize("renorm", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gating_weighs_all_or_the_chosen_and_takes_the_lower_of_equals(dtype: torch.dtype, renorm: int) -> None:
    x = torch.randn(5, 8).to(dtype)
    x[0] = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 1.0, 1.0, 0.0])
    y, ids, rest = kernels.npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=renorm)
    for row in range(5):
        e = [math.exp(v) for v in x[row].tolist()]
        wanted = sorted(range(8), key=lambda i, e=e: (-e[i], i))[:3]
        assert ids[row].tolist() == wanted
        near(y[row], torch.tensor([e[i] / sum(e[i] for i in (wanted if renorm else range(8))) for i in wanted]))
    assert (y.dtype, ids.dtype, rest.dtype, rest.shape) == (dtype, torch.int32, torch.float32, (0,))
    assert kernels.npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=renorm, output_softmax=True)[2].shape == ((0,) if renorm else (5, 8))


def test_gating_breaks_long_ties_by_the_lower_expert() -> None:
    assert kernels.npu_moe_gating_top_k_softmax_v2(torch.zeros(2, 512), k=10)[1].tolist() == [list(range(10))] * 2


@pytest.mark.parametrize("option", [{"renorm": 2}, {"k": 5}, {"finished": torch.zeros(1, dtype=torch.bool)}])
def test_gating_refuses_what_it_does_not_know(option: dict[str, Any]) -> None:
    with pytest.raises(LoweringError, match=next(iter(option))):
        kernels.npu_moe_gating_top_k_softmax_v2(torch.zeros(1, 4), **{"k": 2} | option)


def gating(x: torch.Tensor, bias: torch.Tensor, groups: int, kept: int, two: int, sigmoid: int) -> list[tuple[list[int], list[float]]]:
    """The documentation's definition, row by row: the best groups, then their best 3 experts."""
    rows = []
    for row in x.tolist():
        total = sum(math.exp(v) for v in row)
        scores = [1 / (1 + math.exp(-v)) if sigmoid else math.exp(v) / total for v in row]
        biased = [score + shift for score, shift in zip(scores, bias.tolist(), strict=True)]
        each = len(row) // groups
        worth = [sum(sorted(biased[g * each : (g + 1) * each])[-1 - two :]) for g in range(groups)]
        open_groups = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
        ids = sorted((i for g in open_groups for i in range(g * each, (g + 1) * each)), key=lambda i: (-biased[i], i))[:3]
        share = sum(scores[i] for i in ids) if sigmoid else 1
        rows.append((ids, [2.5 * scores[i] / share for i in ids]))
    return rows


@pytest.mark.parametrize(("groups", "kept", "two"), [(1, 1, 0), (4, 2, 1), (4, 3, 0), (6, 6, 1)])
@pytest.mark.parametrize("sigmoid", [0, 1])
def test_gating_of_groups_is_its_definition(groups: int, kept: int, two: int, sigmoid: int) -> None:
    x, bias = torch.randn(30, 12), torch.randn(12) * 0.3
    options = {"k_group": kept, "group_count": groups, "group_select_mode": two, "norm_type": sigmoid, "routed_scaling_factor": 2.5}
    y, ids, _ = kernels.npu_moe_gating_top_k(x, 3, bias=bias, **options)
    for row, (want, shares) in enumerate(gating(x, bias, groups, kept, two, sigmoid)):
        assert ids[row].tolist() == want
        near(y[row], torch.tensor(shares))


@pytest.mark.parametrize("option", [{"renorm": 1}, {"group_count": 3}, {"group_count": 4, "group_select_mode": 1}, {"k": 5}])
def test_gating_of_groups_refuses_what_the_tiling_refuses(option: dict[str, Any]) -> None:
    with pytest.raises(LoweringError, match="legal are"):
        kernels.npu_moe_gating_top_k(torch.zeros(1, 4), **{"k": 2} | option)
