"""tools/bench/serve/arrivals.py: the same seed gives the same times, with the mean and the spread that were asked for."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.tools.bench.serve.arrivals import arrival_times


@given(st.integers(0, 50), st.floats(0.1, 1e4), st.floats(0.1, 10), st.integers())
def test_times_are_a_function_of_the_seed_and_ascend_from_0(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(count, rate, burstiness, seed)
    assert times == arrival_times(count, rate, burstiness, seed)
    assert len(times) == count
    assert times[:1] == (0.0,) * min(count, 1)
    assert all(a <= b for a, b in itertools.pairwise(times))


@pytest.mark.parametrize(("burstiness", "deviation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_a_gamma_distribution(burstiness: float, deviation: float) -> None:
    gaps = [b - a for a, b in itertools.pairwise(arrival_times(20_001, 8.0, burstiness, 3))]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.03)
    # The coefficient of variation of a gamma distribution is shape^-1/2; of Poisson arrivals it is 1.
    assert statistics.pstdev(gaps) / mean == pytest.approx(deviation, rel=0.03)


def test_other_seeds_give_other_times_and_no_rate_gives_none() -> None:
    assert arrival_times(3, 1.0, 1.0, 1) != arrival_times(3, 1.0, 1.0, 2)
    assert arrival_times(3, math.inf, 1.0, 1) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf)])
def test_what_is_no_rate_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(SpecError, match="legal are numbers above 0"):
        arrival_times(2, rate, burstiness, 0)
