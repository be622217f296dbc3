"""tools/advisor/plan/products.py: limits that each kernel's time has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.products import (
    NORMAL,
    SKEW,
    Speeds,
    collective,
    distinct_experts,
    exchange,
    grouped_attention,
    product,
)
from npucompile.tools.advisor.plan.shape import shape_of
from npucompile.tools.advisor.plan.system import PlannedLayout, PlannedMachine

SPEEDS = Speeds(PlannedMachine("a3"), fitted())


def test_few_rows_wait_for_weights_and_many_for_the_matrix_unit():
    weights = 7168.0 * 2048
    assert product(SPEEDS, 1, weights, 1.0) == pytest.approx(weights / SPEEDS.memory, rel=0.01)
    assert product(SPEEDS, 1e6, weights, 1.0) == pytest.approx(2e6 * weights / SPEEDS.int8, rel=0.01)
    assert product(SPEEDS, 17, weights, 1.0) == product(SPEEDS, 32, weights, 1.0)


def test_one_request_and_head_are_read_by_one_core():
    alone = float(grouped_attention(SPEEDS, np.array(1.0), 1, 18000.0, 4, 1, 128))
    assert alone == pytest.approx(4 * 128 * 18000 / SPEEDS.core, rel=0.02)


@given(st.integers(1, 400), st.sampled_from([8, 64]), st.integers(1, 4))
def test_distinct_experts_are_those_of_a_draw(tokens: int, experts: int, per_token: int) -> None:
    ours = float(distinct_experts(tokens, experts, per_token)[0])
    assert min(tokens, 1) <= ours <= min(experts, tokens * per_token) + 1e-9


def test_distinct_experts_match_a_simulation():
    draw = np.random.default_rng(1)
    chance = np.arange(1, 129.0) ** -SKEW
    chance = np.minimum(8 * chance / chance.sum(), 1)
    drawn = (draw.random((400, 32, 128)) < chance).any(1).sum(1).mean()
    assert float(distinct_experts(32, 128, 8)[0]) == pytest.approx(drawn, rel=0.01)


def test_the_exchange_goes_through_the_published_table():
    shape, ideal = shape_of("deepseek-r1"), fitted()
    speeds = Speeds(PlannedMachine("a3"), type(ideal)(**{**vars(ideal), "imbalance": 1.0}))
    both = {ranks: float(exchange(speeds, shape, PlannedLayout(ranks, 1), np.array(128.0))) * 1e6 for ranks in (8, 16, 32)}
    for ranks, published in {8: 132 + 126, 16: 139 + 135, 32: 153 + 151}.items():
        assert both[ranks] == pytest.approx(published, rel=0.07)
    assert set(NORMAL) >= {8, 16, 32, 64, 128}


def test_a_collective_of_one_rank_is_free():
    assert float(collective(SPEEDS, 1e6, 1, 2)) == 0
    assert float(collective(SPEEDS, 1e9, 8, 2)) == pytest.approx(2 * 7 / 8 * 1e9 / (1.96e11 * fitted().link), rel=0.01)
