"""tools/plan/step_law.py: a law comes back from steps of two buckets, and reading is as fast as buffers of its size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.plan.step_law import ReadRates, StepLaw, non_negative

RATES = ReadRates([(1e9, 1e9), (1e6, 5e9)])


def test_reading_is_as_fast_as_a_buffer_of_the_size():
    assert [RATES.of(size) for size in (1, 1e6, 1e9, 1e12)] == pytest.approx([5e9, 5e9, 1e9, 1e9])
    assert RATES.of(10**7.5) == pytest.approx(3e9)


@pytest.mark.parametrize("factors", [(1e-3, 1e-9, 3.0), (0.0, 5e-8, 1.0), (2e-3, 1e-12, 0.0)])
def test_a_law_comes_back(tiny_artifact: Path, factors: tuple[float, float, float]) -> None:
    manifest = Artifact.open(tiny_artifact).manifest
    entries = [entry for entry in manifest.graphs if entry.bucket.kind == "decode"]
    law = StepLaw(manifest, RATES, *factors)
    found = StepLaw.fit(manifest, [(e, c, law.seconds(e, e.bucket.batch, c)) for e in (entries[0], entries[-1]) for c in (4, 40)], RATES)
    for entry in entries:
        assert found.seconds(entry, entry.bucket.batch, 20) == pytest.approx(law.seconds(entry, entry.bucket.batch, 20), rel=0.005)
    # Fewer live rows read fewer keys, and the bucket computes as much.
    largest = entries[-1]
    if factors[2]:
        assert found.seconds(largest, 1, 40) < found.seconds(largest, largest.bucket.batch, 40)
    with pytest.raises(SpecError, match="1 measured steps; legal is at least two"):
        StepLaw.fit(manifest, [(largest, 4, 1.0)], RATES)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=2), st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_no_entry_is_negative_and_none_better_is_near(x: list[float], noise: list[float]) -> None:
    columns = np.asarray([[1.0, 3.0], [1.0, 5.0], [1.0, 11.0], [1.0, 2.0]])
    target = columns @ np.asarray(x) + noise
    miss, found = non_negative(columns, target)
    assert (found >= 0).all()
    for step in np.vstack([np.eye(2), -np.eye(2)]) * 1e-3:
        near = np.maximum(found + step, 0)
        assert ((columns @ near - target) ** 2).sum() >= miss - 1e-9
