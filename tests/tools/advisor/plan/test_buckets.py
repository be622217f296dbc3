"""tools/advisor/plan/buckets.py: as good as trying every list."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.plan.buckets import (
    best_lists,
    curve_lines,
    evaluate,
    middle,
    of_metrics,
    of_prediction,
    prefill_sizes,
    shortest,
    step_seconds,
)
from npucompile.tools.advisor.plan.predict import predict
from npucompile.tools.advisor.plan.published import case_of, ids

HISTOGRAMS = st.dictionaries(st.integers(1, 12), st.integers(1, 50), min_size=1, max_size=8)


def affine(fixed: float):
    return lambda rows: fixed + np.asarray(rows, dtype=float)


@given(HISTOGRAMS, st.floats(0, 20), st.integers(1, 4), st.sets(st.integers(1, 14), max_size=2))
@settings(max_examples=150, deadline=None)
def test_it_is_the_best_of_all_lists(steps: dict[int, int], fixed: float, most: int, always: set[int]) -> None:
    top = max(*steps, *always, 1)
    if len(always | {top}) > most:
        with pytest.raises(SpecError, match="legal is at least as many"):
            best_lists(steps, affine(fixed), most, always)
        return
    found = best_lists(steps, affine(fixed), most, always)
    for each in found:
        count = len(each.buckets)
        legal = (set(some) | always | {top} for some in itertools.combinations(range(1, top + 1), count))
        brute = min(evaluate(sorted(every), steps, affine(fixed)).seconds for every in legal if len(every) == count)
        assert each.seconds == pytest.approx(brute)
        assert evaluate(each.buckets, steps, affine(fixed)).seconds == pytest.approx(each.seconds)
        assert always <= set(each.buckets)
    assert [each.seconds for each in found] == sorted((each.seconds for each in found), reverse=True)
    assert len(shortest(found).buckets) <= len(found[-1].buckets)


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 2), st.floats(0.5, 30))
@settings(max_examples=60, deadline=None)
def test_prefill_sizes_are_the_best_of_all(prompts: dict[int, int], most: int, fixed: float) -> None:
    found = prefill_sizes(prompts, lambda tokens: fixed + tokens, 32, most, multiple=8)

    def total(sizes) -> float:
        largest, time = max(sizes), 0.0
        for tokens, count in prompts.items():
            chunks, rest = divmod(tokens, largest)
            time += count * chunks * (fixed + largest)
            time += count * (fixed + min(size for size in sizes if size >= rest)) if rest else 0.0
        return time

    top = -(-min(32, max(prompts)) // 8) * 8
    every = [sizes for count in range(1, most + 1) for sizes in itertools.combinations(range(8, top + 1, 8), count)]
    assert total(found.buckets) == pytest.approx(min(map(total, every)))
    assert found.seconds == pytest.approx(total(found.buckets))
    decided = prefill_sizes(prompts, lambda tokens: fixed + tokens, 32, most, multiple=8, largest=32)
    assert decided.buckets[-1] == 32
    assert total(decided.buckets) == pytest.approx(
        min(total(sizes) for sizes in itertools.combinations(range(8, 33, 8), len(decided.buckets)) if 32 in sizes)
    )


@pytest.mark.parametrize("name", [name for name in ids() if len(case_of(name).decode.buckets) > 1][::3])
def test_it_is_never_worse_than_the_published_list(name: str) -> None:
    case = case_of(name)
    prediction = predict(case)
    seconds = step_seconds(case, middle(prediction, case))
    published = evaluate(case.decode.buckets, prediction.trace.steps, seconds)
    lists = of_prediction(prediction, case, len(case.decode.buckets))
    assert lists[-1].seconds <= published.seconds * (1 + 1e-9)
    assert len(curve_lines(lists, case, published)) == len(lists) + 2


def test_metrics_of_a_server():
    text = """
# TYPE npucompile:decode_batch_steps_total counter
npucompile:decode_batch_steps_total{batch_size="1"} 10.0
npucompile:decode_batch_steps_total{batch_size="3",instance="a"} 2e+06
npucompile:decode_batch_steps_total{instance="b",batch_size="3"} 5.0
npucompile:bucket_steps_total{bucket="decode-b4-q4"} 30.0
"""
    assert of_metrics(text) == {1: 10, 3: 2000005}
    with pytest.raises(SpecError, match="count no decode step"):
        of_metrics("")
    with pytest.raises(SpecError, match="at least one size"):
        best_lists({}, affine(1), 3)
