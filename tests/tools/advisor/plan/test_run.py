"""tools/advisor/plan/run.py: means and percentiles as numpy has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.tools.advisor.plan.run import LatencySpread, by_priority, weighted


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1))
def test_weights_count_like_repetitions(pairs) -> None:
    values = np.repeat([value for value, _ in pairs], [count for _, count in pairs])
    ours = weighted(pairs)
    assert ours.mean == pytest.approx(values.mean(), abs=1e-9)
    for quantile, mark in zip((0.5, 0.95, 0.99), ours[1:], strict=True):
        assert np.quantile(values, quantile, method="inverted_cdf") == pytest.approx(mark)
    assert LatencySpread.of(values).mean == pytest.approx(ours.mean)


def test_priorities_have_their_own_means():
    values = np.asarray([1.0, 2.0, 5.0])
    assert {level: spread.mean for level, spread in by_priority(values, (3, 0, 3)).items()} == {0: 2.0, 3: 3.0}
    assert list(by_priority(values, (3, 0, 3))) == [0, 3]
    assert by_priority(values, (2, 2, 2)) == by_priority(values, ()) == {}
