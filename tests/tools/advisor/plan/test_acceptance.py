"""tools/advisor/plan/acceptance.py: tokens a step, from chances and from published rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.tools.advisor.plan.acceptance import accepted_of, chance_of, per_request, spread_of, tokens_a_step
from npucompile.tools.advisor.plan.measurements import measured


@given(st.floats(0.01, 0.99), st.integers(1, 7))
def test_chances_come_back(chance: float, drafts: int) -> None:
    assert chance_of(tokens_a_step(chance, drafts), drafts) == pytest.approx(chance, abs=1e-6)


@given(st.floats(1.05, 3.9), st.floats(0, 0.2), st.integers(2, 300))
def test_requests_differ_and_their_steps_average_out(accepted: float, spread: float, requests: int) -> None:
    values = per_request(accepted, spread, 3, requests)
    assert 1 <= values.min() <= values.max() <= 4
    assert 1 / (1 / values).mean() == pytest.approx(accepted, rel=0.05)


def test_the_nearest_row_of_the_model_is_taken_and_named():
    accepted, why = accepted_of("qwen3-32b", 3, 3500, 1500, None)
    assert accepted == 2.05
    assert "qwen3-32b-a2x8-mix-3.5k-1.5k-50ms" in why
    others = set(measured()) - {"qwen3-32b-a2x8-mix-3.5k-1.5k-50ms"}
    assert accepted_of("qwen3-32b", 3, 3500, 1500, others)[0] != 2.05
    assert "nothing is published" in accepted_of("qwen3.5-397b", 3, 3500, 1500, None)[1]
    assert set(per_request(1.0, spread_of("qwen3-32b", 1.0), 0, 5)) == {1.0}
