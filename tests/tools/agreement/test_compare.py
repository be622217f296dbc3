"""tools/agreement/compare.py: tensors agree within the tolerance of their dtype; steps are compared in test_alone.py."""

from __future__ import annotations

import pytest
import torch

from npucompile.tools.agreement.compare import Deviations, mismatch

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("dtype", "allowed", "refused"), [(torch.bfloat16, 0.02, 0.1), (torch.float32, 5e-4, 5e-3)])
def test_floats_may_differ_by_their_dtypes_rounding(dtype, allowed, refused):
    expected = torch.ones(2, 4, dtype=dtype)
    assert mismatch(expected, (expected + allowed).to(dtype)) is None
    worst = mismatch(expected, torch.cat([expected[:1], (expected[1:] + refused).to(dtype)]))
    assert worst is not None
    assert (worst.count, worst.of, worst.index[0]) == (4, 8, 1)


def test_what_the_cpu_leaves_undefined_is_not_compared_and_all_else_is():
    assert mismatch(torch.tensor([NAN, 1.0, INF]), torch.tensor([7.0, 1.0, INF])) is None
    assert mismatch(torch.tensor([1.0]), torch.tensor([NAN])) is not None
    assert mismatch(torch.tensor([INF]), torch.tensor([-INF])) is not None
    lowest = torch.iinfo(torch.int32).min
    assert mismatch(torch.tensor([lowest, 3], dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)) is None
    assert mismatch(torch.tensor([4], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)) is not None
    assert mismatch(torch.tensor([4], dtype=torch.int8), torch.tensor([5], dtype=torch.int8)) is None
    assert mismatch(torch.tensor([True]), torch.tensor([False])) is not None
    assert mismatch(torch.ones(2), torch.ones(3)) is not None


def test_differences_add_up_over_steps_and_the_first_wrong_step_is_known():
    deviations, x = Deviations(), torch.randn(64, generator=torch.Generator().manual_seed(0))
    for step, error in enumerate((0.0, 0.01, 1.0)):
        deviations.add(step, "wrong", x, x * (1 + error))
        deviations.add(step, "right", x, x * 1.001)
        deviations.add(step, "tokens", torch.arange(40), torch.arange(40) + (torch.arange(40) == 7).long())
    assert deviations.beyond() == ["wrong"]
    assert deviations.first_step == {"wrong": 2}
    deviations.add(3, "tokens", torch.arange(40), torch.arange(40) + 1)
    assert deviations.beyond() == ["wrong", "tokens"] or deviations.beyond() == ["tokens", "wrong"]


def test_only_what_changed_is_compared_where_a_mask_says_so():
    deviations, pool = Deviations(), torch.ones(100_000)
    other = pool.clone()
    other[0] = 2.0
    deviations.add(0, "pool", pool, other)
    deviations.add(0, "row", pool, other, torch.arange(100_000) == 0)
    assert deviations.beyond() == ["row"]
    deviations.add(1, "lost", torch.ones(4), torch.tensor([1.0, 1.0, 1.0, NAN]))
    assert "lost" in deviations.beyond()
