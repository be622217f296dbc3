"""runtime/histogram.py: counts beside those of Prometheus's own client."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Published

from npucompile.runtime.histogram import Histogram, one_two_five


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 5.0, 9.0]), st.integers(1, 4)), max_size=20))
def test_counts_are_prometheuss(observations: list[tuple[float, int]]) -> None:
    bounds = (0.5, 1.0, 2.0, 5.0)
    ours, published = Histogram(bounds), Published("h", "h", buckets=bounds, registry=CollectorRegistry())
    for value, times in observations:
        ours.observe(value, times)
        for _ in range(times):
            published.observe(value)
    (family,) = published.collect()
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    snapshot = ours.snapshot()
    assert snapshot.bounds == (*bounds, math.inf)
    assert list(snapshot.counts) == [samples["h_bucket", le] for le in ("0.5", "1.0", "2.0", "5.0", "+Inf")]
    assert snapshot.total == pytest.approx(samples["h_sum", None])


def test_a_snapshot_is_a_copy() -> None:
    histogram = Histogram((1.0,))
    before = histogram.snapshot()
    histogram.observe(0.5)
    assert before.counts == (0, 0)
    assert histogram.snapshot().counts == (1, 1)


def test_bounds_of_lengths() -> None:
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(1) == (1,)
    assert one_two_five(4096)[-3:] == (500, 1000, 2000)
