"""tools/plan/artifact.py: a served artifact is the simulation of its buckets; step models come back from what they make."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.plan.artifact import bucket_named, fit_parts, serve, value_of
from npucompile.tools.plan.system import Workload


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3), st.sets(st.integers(0, 2), max_size=2))
def test_steps_that_are_linear_are_met(factors: list[float], none: set[int]) -> None:
    factors = [0.0 if i in none else factor for i, factor in enumerate(factors)]
    parts = [(1.0, 1e6, 3e3), (1.0, 4e6, 3.5e3), (1.0, 9e6, 7e3), (1.0, 2e6, 9e3)]
    points = [(row, sum(map(float.__mul__, row, factors))) for row in parts]
    found = fit_parts(points)
    assert min(found) >= 0
    for row, seconds in points:
        assert sum(map(float.__mul__, row, found)) == pytest.approx(seconds, rel=1e-3)


def test_one_point_is_too_few():
    with pytest.raises(SpecError, match="1 measured steps; legal is at least two"):
        fit_parts([((1.0,), 1.0)])


def test_buckets_and_cells_are_read():
    assert bucket_named("decode-b4-q3 (2 rows)") == Bucket("decode", 4, 3)
    assert (value_of({"median": 2, "low": 1}), value_of(3), value_of(None)) == (2.0, 3.0, None)
    with pytest.raises(SpecError, match="is no bucket"):
        bucket_named("decode-four")


def test_an_artifact_is_served(own_artifact: Path) -> None:
    artifact = Artifact.open(own_artifact)
    limits = artifact.manifest.limits
    work = Workload.uniform(4, 5, 1, 2)
    served = serve(artifact, work, lambda entry, rows, context: 0.01 * entry.bucket.batch, lambda rows: 0.001)
    smallest = min(e.bucket.batch for e in artifact.manifest.graphs if e.bucket.kind == "decode")
    assert served.tpot_ms.mean == pytest.approx(1e3 * (0.01 * smallest + 0.001), rel=0.01)
    with pytest.raises(SpecError, match=f"serves up to {limits.max_model_len}"):
        serve(artifact, Workload.uniform(limits.max_model_len, 1, 1, 1), lambda entry, rows, context: 1.0, lambda rows: 0.0)
