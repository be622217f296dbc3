"""tools/plan/artifact_views.py: an artifact's bench beside its prediction, and a server of graphs for NPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact, GraphEntry
from npucompile.tools.inspection.cost import step_cost
from npucompile.tools.plan.step_law import ReadRates, StepLaw


def spread(value: float) -> dict[str, float]:
    return {"median": value, "low": value, "high": value, "count": 3}


def step_ms(artifact: Artifact, entry: GraphEntry, context: int) -> float:
    return 1e3 * StepLaw(artifact.manifest, ReadRates([(1e6, 9e9)]), 1e-3, 1e-9, 2.0).seconds(entry, entry.bucket.batch, context)


def bench_of(artifact: Artifact) -> dict[str, object]:
    """What `bench --json` would print on a machine whose steps have a law, and take 2 ms of the host."""
    decode, prefill = ([e for e in artifact.manifest.graphs if e.bucket.kind == kind] for kind in ("decode", "prefill"))
    rows = [
        {
            "bucket": e.bucket.name,
            "context_tokens": context,
            "eager_ms": spread(step_ms(artifact, e, context)),
            "read_mb": 1.0,
            "read_gb_per_s": spread(9.0),
        }
        for e in decode
        for context in (8, 32)
    ]
    figures = [
        {"figure": "decode", "rows": rows},
        {"figure": "decode", "rows": [{"place": "memory", "buffer_mb": 500.0, "gb_per_s": spread(9.0)}]},
        {"figure": "prefill", "rows": [{"bucket": e.bucket.name, "eager_tokens_per_s": spread(e.bucket.tokens / 3e-3)} for e in prefill]},
        {
            "figure": "streams",
            "rows": [
                {
                    "streams": n,
                    "tokens_per_s": spread(50.0 * n),
                    "step_ms": spread(9.0),
                    "host_ms": spread(2.0),
                    "acceptance_length": spread(1),
                }
                for n in (1, 2, 4)
            ]
            + [{"streams": 1, "tokens_per_s": spread(40.0), "step_ms": None}],
        },
    ]
    return {"figures": figures}


def test_a_bench_is_predicted_from_two_buckets(own_artifact: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(own_artifact)
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(bench_of(artifact)))
    words = ("plan", "--artifact", own_artifact, "--measured", file, "--input", 6, "--output", 6)
    data = json.loads(tiny.cli(tmp_path, *words, "--json").stdout)
    sizes = {e.bucket.batch: e for e in artifact.manifest.graphs if e.bucket.kind == "decode"}
    assert data["fitted"] == [min(sizes), max(sizes)]
    steps = [row for row in data["rows"] if row["unit"] == "ms"]
    assert len(steps) == 2 * len(sizes)
    assert any(not row["fitted"] for row in steps)
    for row in steps:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.005)
    streams = {row["what"]: row["predicted"] for row in data["rows"] if row["unit"] == "tok/s"}
    # One stream: a prefill, then five steps of the smallest bucket; the host's part with each.
    bucket = step_ms(artifact, sizes[1], 9)
    assert streams["1 streams"] == pytest.approx(6 / (3.0 + 2.0 + 5 * (bucket + 2.0)) * 1e3, rel=0.01)
    assert streams["1 streams"] < streams["2 streams"] < streams["4 streams"]
    assert "fitted to decode buckets" in tiny.cli(tmp_path, *words).stdout
    assert "the bench measured" in tiny.refused(tmp_path, "plan", "--artifact", own_artifact, "--measured", f"{file}:1,99")


def test_an_artifact_for_this_machine_needs_a_bench(own_artifact: Path, tmp_path: Path) -> None:
    assert "legal is --measured" in tiny.refused(tmp_path, "plan", "--artifact", own_artifact)


def test_graphs_for_npus_serve_with_their_operators_times(npu_artifact, tmp_path: Path) -> None:
    path = npu_artifact("")
    words = ("plan", "--artifact", path, "--input", 8, "--output", 8, "--concurrency", 2, "--accepted", 1, "--json")
    result = tiny.cli(tmp_path, *words)
    assert result.exit_code == 0, result.output
    predicted = json.loads(result.stdout)["predicted"]
    artifact = Artifact.open(path)
    entry = min((e for e in artifact.manifest.graphs if e.bucket.kind == "decode" and e.bucket.batch >= 2), key=lambda e: e.bucket)
    # A token takes a step of the bucket of two, and the host's part of it.
    assert predicted["tpot_ms"] == pytest.approx(step_cost(artifact, entry, 12).step_ms + 1, rel=0.35)
