"""tools/advisor/plan/decode.py: what a step's time does when its system changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npucompile.tools.advisor.plan.decode import CAUSES, decode_parts, kernels
from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.published import case_of, ids


def total(system, batch, context) -> float:
    return float(sum(decode_parts(system, fitted(), batch, context).values()))


@pytest.mark.parametrize("name", ["dsr1-a3x16-pd-2k-2k-50ms", "qwen35-397b-a3x8-in3k5-out1k5-50ms", "qwen3-32b-a3x2-mix-2k-2k-50ms"])
def test_more_rows_longer_contexts_and_more_drafts_take_longer(name: str) -> None:
    system = case_of(name).decode
    assert total(system, 8, 2000) < total(system, 16, 2000) < total(system, 16, 8000)
    assert total(replace(system, drafts=1), 16, 2000) < total(system, 16, 2000)


def test_a_grid_is_its_points():
    system = case_of("qwen3-next-a3x2-mix-3.5k-1.5k-50ms").decode
    grid = decode_parts(system, fitted(), np.array([[1], [80]]), np.array([[1000.0, 4000.0]]))
    assert list(grid) == list(CAUSES)
    assert float(sum(grid.values())[1, 0]) == pytest.approx(total(system, 80, 1000))


def test_causes_that_a_layout_does_not_have_are_zero():
    split = case_of("qwen3-30b-a3x1-mix-3.5k-1.5k-50ms").decode
    parts = decode_parts(split, fitted(), 8, 1000)
    assert float(parts["exchange"]) == float(parts["products"]) == 0
    assert float(parts["experts"]) > 0
    alone = replace(split, layout=replace(split.layout, tp=1))
    assert float(decode_parts(alone, fitted(), 8, 1000)["collectives"]) == 0


def test_kernels_of_a_step():
    assert kernels(case_of("qwen3-32b-a3x2-mix-2k-2k-50ms").decode) == 64 * (9 + 5)
    assert all(kernels(case_of(name).decode) > 0 for name in ids())
