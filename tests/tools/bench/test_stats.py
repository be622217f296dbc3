from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.tools.bench.stats import Spread, interleave, ratio, seconds_per_call, spread

FINITE = st.floats(1e-6, 1e6)


class FakeClock:
    """Stands still but for what the work it is given takes."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(FINITE, min_size=1))
def test_a_spread_is_of_all_samples_in_any_order(samples: list[float]) -> None:
    result = spread(samples)
    assert result == spread(reversed(samples))
    assert result == Spread(statistics.median(samples), min(samples), max(samples), len(samples))


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        spread([])


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1), st.floats(1.5, 50))
def test_a_ratio_is_taken_within_a_round(rounds: list[tuple[float, float]], times: float) -> None:
    # The machine slows down by any factor from round to round; a contender that always takes `times` as long is found to.
    slow, fast = [a * b * times for a, b in rounds], [a * b for a, b in rounds]
    result = ratio(slow, fast)
    assert result.low == pytest.approx(times)
    assert result.high == pytest.approx(times)


def test_contenders_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []

    def contender(name: str) -> int:
        order.append(name)
        return len(order)

    result = interleave({"a": lambda: contender("a"), "b": lambda: contender("b"), "c": lambda: contender("c")}, 3)
    assert "".join(order) == "abccbaabccba"
    assert result == {"a": [6, 7, 12], "b": [5, 8, 11], "c": [4, 9, 10]}


@given(st.lists(FINITE, min_size=3, max_size=9))
def test_the_first_call_settles_and_the_others_are_timed(durations: list[float]) -> None:
    clock = FakeClock()
    work = iter(durations)

    def call() -> None:
        clock.now += next(work)

    result = seconds_per_call(call, clock, calls=len(durations) - 1)
    assert result == pytest.approx(statistics.median(durations[1:]), abs=1e-6)
    assert next(work, None) is None
