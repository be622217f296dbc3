"""tools/plan/artifact.py: a served artifact is the simulation of its buckets; step models come back from what they make."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.plan.artifact import bucket_named, serve, value_of
from npucompile.tools.plan.system import Workload


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
