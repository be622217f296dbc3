"""tools/advisor/plan/artifact.py: a served artifact is the simulation of its buckets, with the times of its graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.advisor.plan.artifact import serve
from npucompile.tools.advisor.plan.system import Workload
from npucompile.tools.inspection.cost import step_cost


def test_an_artifact_is_served(own_artifact: Path) -> None:
    artifact = Artifact.open(own_artifact)
    limits = artifact.manifest.limits
    served = serve(artifact, Workload.uniform(4, 5, 1, 2), lambda entry, context: 0.01 * entry.bucket.batch)
    smallest = min(e.bucket.batch for e in artifact.manifest.graphs if e.bucket.kind == "decode")
    assert served.tpot_ms.mean == pytest.approx(1e3 * 0.01 * smallest, rel=0.01)
    with pytest.raises(SpecError, match=f"serves up to {limits.max_model_len}"):
        serve(artifact, Workload.uniform(limits.max_model_len, 1, 1, 1), lambda entry, context: 1.0)


def test_an_artifact_for_this_machine_is_measured(own_artifact: Path, tmp_path: Path) -> None:
    words = ("plan", "--artifact", own_artifact)
    assert "legal is an artifact for NPUs, or `npucompile bench" in tiny.refused(tmp_path, *words)
    assert "--measured is gone: " in tiny.refused(tmp_path, *words, "--measured", "bench.json")


def test_graphs_for_npus_serve_with_their_operators_times(npu_artifact, tmp_path: Path) -> None:
    path = npu_artifact("")
    words = ("plan", "--artifact", path, "--input", 8, "--output", 8, "--concurrency", 2, "--accepted", 1)
    result = tiny.cli(tmp_path, *words, "--json")
    assert result.exit_code == 0, result.output
    predicted = json.loads(result.stdout)["predicted"]
    artifact = Artifact.open(path)
    entry = min((e for e in artifact.manifest.graphs if e.bucket.kind == "decode" and e.bucket.batch >= 2), key=lambda e: e.bucket)
    # A token takes a step of the bucket of two, and the host's part of it.
    assert predicted["tpot_ms"] == pytest.approx(step_cost(artifact, entry, 12).step_ms + 1, rel=0.35)
    assert f"predicted  TPOT {predicted['tpot_ms']:.1f} ms" in tiny.cli(tmp_path, *words).stdout
