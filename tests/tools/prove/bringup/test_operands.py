"""tools/prove/bringup/operands.py: operands are legal for the CPU kernel of their operator, and special where their name says so."""

from __future__ import annotations

import pytest
import torch
from support import ge_calls as gc

from npucompile.tools.prove.bringup.operands import distinct, variants


def op(kind: str, inputs: dict[str, torch.Tensor], **attrs):
    return gc.call(kind, inputs, **attrs).op


def drawn(kind: str, inputs: dict[str, torch.Tensor], **attrs) -> dict[str, dict[str, torch.Tensor]]:
    return dict(variants(op(kind, inputs, **attrs), inputs, frozenset()))


def test_floats_are_recorded_random_zero_and_large_and_never_nan():
    inputs = {"x": torch.tensor([[1.0, float("nan")], [2.0, 3.0]])}
    sets = drawn("Exp", inputs)
    assert list(sets) == ["recorded", "random", "zeros", "large"]
    assert not any(bool(operands["x"].isnan().any()) for operands in sets.values())
    assert not sets["zeros"]["x"].any()
    assert float(drawn("Neg", inputs)["large"]["x"].abs().min()) == 64.0


def test_int8_reaches_both_ends():
    assert set(drawn("Cast", {"x": torch.zeros(64, dtype=torch.int8)})["large"]["x"].tolist()) == {-127, 127}


def test_divisors_and_logarithms_get_no_zeros():
    inputs = {"x1": torch.ones(8), "x2": torch.ones(8)}
    sets = drawn("RealDiv", inputs)
    assert "zeros" not in sets
    assert all(bool((operands["x2"].abs() > 0).all()) for operands in sets.values())
    assert all(bool((operands["x"] > 0).all()) for name, operands in drawn("Log", {"x": torch.ones(8)}).items() if name != "recorded")


def test_indices_stay_in_range_and_rows_that_are_written_differ():
    inputs = {"x": torch.randn(5, 3), "indices": torch.zeros(64, dtype=torch.int32), "axis": gc.i64(0)}
    indices = drawn("GatherV2", inputs)["random"]["indices"]
    assert set(indices.tolist()) == set(range(5))
    inputs = {"var": torch.randn(9, 2), "indices": torch.zeros(6, 1, dtype=torch.int32), "updates": torch.randn(6, 2)}
    rows = drawn("ScatterNdUpdate", inputs)["random"]["indices"].flatten().tolist()
    assert len(set(rows)) == 6
    assert max(rows) < 9
    inputs = {"var": torch.randn(3, 2, 5), "indices": torch.zeros(2, 3, 2, dtype=torch.int32), "updates": torch.randn(2, 3, 5)}
    places = drawn("ScatterNdUpdate", inputs)["random"]["indices"].flatten(0, 1).tolist()
    assert sorted(places) == [[page, offset] for page in range(3) for offset in range(2)]


@pytest.mark.parametrize("kind", [0, 1])
def test_groups_are_also_all_empty_and_all_in_one(kind):
    inputs = {"x0": torch.randn(8, 4), "weight0": torch.randn(3, 4, 2), "group_list": torch.tensor([2, 3, 3] if kind else [2, 5, 8])}
    sets = drawn("GroupedMatmul", inputs, group_list_type=kind)
    counts = {name: operands["group_list"] if kind else operands["group_list"].diff(prepend=gc.i64(0)) for name, operands in sets.items()}
    assert counts["no rows"].tolist() == [0, 0, 0]
    assert counts["one group has all"].tolist() == [0, 0, 8]
    assert int(counts["random"].sum()) == 6


def test_experts_of_a_token_differ_and_all_tokens_may_choose_the_same():
    inputs = {"x": torch.randn(6, 4), "expert_idx": torch.zeros(6, 2, dtype=torch.int32)}
    sets = drawn("MoeInitRoutingV3", inputs, expert_num=5, active_expert_range=[0, 4])
    chosen = sets["random"]["expert_idx"]
    assert bool((chosen[:, 0] != chosen[:, 1]).all())
    assert int(chosen.max()) < 4
    assert set(map(tuple, sets["all tokens to the same experts"]["expert_idx"].tolist())) == {(0, 1)}
    assert set(sets["no token to an expert of this rank"]["expert_idx"].flatten().tolist()) == {4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_that_sort_get_no_equal_values(dtype):
    values = distinct((3, 2048), dtype, torch.Generator().manual_seed(0))
    assert all(len(set(row.tolist())) == 2048 for row in values)
    assert bool(values.isfinite().all())
    assert list(drawn("Sort", {"x": torch.zeros(2, 8, dtype=dtype)})) == ["random"]
