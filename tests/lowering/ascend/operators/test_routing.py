"""lowering/ascend/operators/routing.py: the choice of experts equals plain loops; what the device would misread is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import routing as kernels

FLOATS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("renorm", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gating_weighs_all_or_the_chosen_and_takes_the_lower_of_equals(dtype: torch.dtype, renorm: int) -> None:
    x = torch.randn(5, 8).to(dtype)
    x[0] = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 1.0, 1.0, 0.0])
    y, ids, _ = kernels.npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=renorm)
    for row in range(5):
        e = [math.exp(v) for v in x[row].tolist()]
        wanted = sorted(range(8), key=lambda i, e=e: (-e[i], i))[:3]
        assert ids[row].tolist() == wanted
        gc.near(y[row], torch.tensor([e[i] / sum(e[i] for i in (wanted if renorm else range(8))) for i in wanted]))


def gating(x: torch.Tensor, bias: torch.Tensor, groups: int, chosen: int) -> list[tuple[list[int], list[float]]]:
    """The documentation's definition, row by row: the groups with the best pairs, then their best 3 experts."""
    rows = []
    for row in x.tolist():
        scores = [1 / (1 + math.exp(-v)) for v in row]
        biased = [score + shift for score, shift in zip(scores, bias.tolist(), strict=True)]
        each = len(row) // groups
        worth = [sum(sorted(biased[g * each : (g + 1) * each])[-2:]) for g in range(groups)]
        open_groups = sorted(range(groups), key=lambda g: (-worth[g], g))[:chosen]
        ids = sorted((i for g in open_groups for i in range(g * each, (g + 1) * each)), key=lambda i: (-biased[i], i))[:3]
        rows.append((ids, [2.5 * scores[i] / sum(scores[i] for i in ids) for i in ids]))
    return rows


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (6, 6)])
def test_gating_of_groups_is_its_definition(groups: int, chosen: int) -> None:
    x, bias = torch.randn(30, 12), torch.randn(12) * 0.3
    options = {"k_group": chosen, "group_count": groups, "group_select_mode": 1, "norm_type": 1, "routed_scaling_factor": 2.5}
    y, ids, _ = kernels.npu_moe_gating_top_k(x, 3, bias=bias, **options)
    for row, (want, shares) in enumerate(gating(x, bias, groups, chosen)):
        assert ids[row].tolist() == want
        gc.near(y[row], torch.tensor(shares))


IDS = torch.tensor([[3, 0], [1, 3], [2, 1], [3, 5]], dtype=torch.int32)
COUNTED = {"expert_num": 6, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}


@pytest.mark.parametrize(("low", "high"), [(0, 6), (1, 4), (4, 6)])
@pytest.mark.parametrize("quant_mode", [-1, 1])
def test_rows_are_sorted_by_expert(low: int, high: int, quant_mode: int) -> None:
    x = torch.randn(4, 3).bfloat16()
    options = COUNTED | {"active_expert_range": [low, high], "quant_mode": quant_mode}
    rows, index, counts, scales = kernels.npu_moe_init_routing_v2(x, IDS, **options)
    order = [i for e in range(low, high) for i, v in enumerate(IDS.flatten().tolist()) if v == e]
    wide, live = x[[i // 2 for i in order]], len(order)
    if quant_mode == 1:
        assert (rows[:live] - wide.float() / scales[:live, None]).abs().max() <= 0.501
        assert rows[:live].abs().amax(-1).tolist() == [127] * live
        assert (rows[live:] == -128).all()
    else:
        assert torch.equal(rows[:live], wide)
        assert rows[live:].isnan().all()
    assert scales[live:].isnan().all()
    assert counts.tolist() == [IDS.flatten().tolist().count(e) for e in range(low, high)]
    assert index.tolist() == [order.index(i) if i in order else -1 for i in range(8)]


def finalized(index: torch.Tensor, **changes: Any) -> torch.Tensor:
    args = {"skip1": None, "skip2": None, "bias": None, "scales": torch.ones(2, 2), "export_for_source_row": None, "drop_pad_mode": 3}
    rows = torch.tensor([[1.0], [float("nan")], [2.0], [4.0]])
    return kernels.npu_moe_finalize_routing(**{"expanded_permuted_rows": rows[None], "expanded_src_to_dst_row": index} | args | changes)


INDEX = torch.tensor([3, 2, 0, -1], dtype=torch.int32)


def test_an_undefined_row_is_read_where_it_is_named_alone() -> None:
    assert finalized(INDEX).tolist() == [[6.0], [1.0]]
    assert finalized(INDEX.abs())[1].isnan()


@pytest.mark.parametrize(
    ("kernel", "args", "options", "message"),
    [
        *(("softmax", (), {"k": 2} | option, next(iter(option))) for option in ({"renorm": 2}, {"k": 5}, {"finished": torch.ones(1)})),
        *(
            ("gating", (2,), {"group_select_mode": 1, "norm_type": 1} | option, message)
            for option, message in (
                ({"group_select_mode": 0}, "group_select_mode 0, norm_type 1; legal are 1 and 1"),
                ({"norm_type": 0}, "norm_type 0"),
                ({"renorm": 1}, "renorm=1 has no CPU kernel"),
                ({"out_flag": True}, "out_flag=True has no CPU kernel"),
                ({"group_count": 3}, "1 of 3 groups of 4 experts; legal are"),
                ({"group_count": 4}, "two at least"),
            )
        ),
    ],
)
def test_gating_refuses(kernel: str, args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    kernel = {"softmax": kernels.npu_moe_gating_top_k_softmax_v2, "gating": kernels.npu_moe_gating_top_k}[kernel]
    with pytest.raises(LoweringError, match=message):
        kernel(torch.zeros(1, 4), *args, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_mode": 0}, "quant_mode 0"),
        ({"active_num": 4}, "active_num 4.*legal is 8"),
        ({"drop_pad_mode": 1}, "drop_pad_mode=1"),
        ({"expert_tokens_num_type": 0}, "expert_tokens_num_type 0"),
        ({"expert_tokens_num_flag": False}, "expert_tokens_num_flag False"),
        ({"row_idx_type": 1}, "row_idx_type=1"),
        ({"scale": torch.zeros(2, 3)}, "scale=tensor"),
    ],
)
def test_sorting_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        kernels.npu_moe_init_routing_v2(torch.zeros(4, 3), IDS, **COUNTED | options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expanded_src_to_dst_row": INDEX + 1}, "row indices from 0 to 4; legal is -1 to 3"),
        ({"scales": torch.ones(2, 2).half()}, r"scales is .*float16; legal is a tensor of .*float32"),
        ({"scales": None}, "scales is absent"),
        ({"drop_pad_mode": 2}, "drop_pad_mode is 2; legal is 3"),
        ({"expanded_permuted_rows": torch.ones(4, 1)}, r"expanded_permuted_rows .* with \[3\] dimensions"),
        ({"skip1": torch.ones(2, 1)}, "skip1=tensor"),
    ],
)
def test_summing_refuses_what_the_kernel_misreads(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        finalized(INDEX, **changes)
