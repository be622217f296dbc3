"""tools/advisor/plan/table.py: linear between its contexts, and the bucket that the runtime would choose."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.types import Bucket
from npucompile.runtime.steps.sizes import choose
from npucompile.tools.advisor.plan.decode import decode_parts
from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.published import case_of
from npucompile.tools.advisor.plan.table import StepTable, step_table


@given(st.sets(st.integers(1, 64), min_size=1), st.integers(1, 80), st.floats(10, 500), st.booleans())
def test_a_linear_time_is_met_exactly(buckets: set[int], rows: int, context: float, lazily: bool) -> None:
    sizes, asked = sorted(buckets), list[float]()

    def seconds(batch: Any, cached: Any) -> Any:
        asked.extend(batch.flat)
        return 1 + 2 * batch + 3 * batch * cached

    table = StepTable(sizes, 10, 500, seconds, lazily=lazily)
    bucket = choose([Bucket("decode", size, 1) for size in sizes], rows).batch
    assert table.bucket(rows) == bucket
    assert table.seconds(rows, context) == table.seconds(rows, context) == pytest.approx(1 + 2 * bucket + 3 * bucket * context)
    assert asked == ([bucket] if lazily else sizes)


def test_a_system_is_interpolated_within_a_percent():
    system = case_of("qwen3-32b-a3x2-mix-2k-2k-50ms").decode
    table = step_table(system, fitted(), 120, 2000, 4000)
    for rows, context in ((50, 2100.0), (77, 2900.0), (120, 3970.0)):
        exact = sum(float(part) for part in decode_parts(system, fitted(), table.bucket(rows), context).values())
        assert table.seconds(rows, context) == pytest.approx(exact, rel=0.01)
    assert table.buckets[-1] == 120


@pytest.mark.parametrize("lazily", [False, True])
def test_a_larger_bucket_may_be_faster(lazily):
    table = StepTable([1, 4, 8], 10, 500, lambda batch, cached: abs(batch - 4) + 0 * cached, lazily=lazily)
    assert [(table.seconds(rows, 50), table.most_seconds(rows, 50)) for rows in (1, 3, 8)] == [(3, 3), (0, 3), (4, 4)]
