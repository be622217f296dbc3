"""tools/advisor/plan/prediction.py: the bucket, context and tokens of a published row decide its line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import ge_artifacts
from support import ge_bodies as gb

from npucompile.graphs.errors import SpecError
from npucompile.lowering.ascend.link import link
from npucompile.tools.advisor.plan import prediction
from npucompile.tools.bench.report import as_markdown
from npucompile.tools.builder.deployments import deployment
from npucompile.tools.inspection.cost import step_cost

ROW = "qwen35-397b-a3x8-in64k-out1k-20ms"  # eight requests in flight, two groups


@pytest.fixture(scope="module")
def ge_file(tmp_path_factory):
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    return link(*gb.two_kinds(2), ta)


@pytest.fixture
def artifact(own_artifact, ge_file):
    return ge_artifacts.published(own_artifact, ge_file, deployment=ROW)


def longer(artifact, ge_file):
    limits = replace(artifact.manifest.limits, max_model_len=2**17)
    return ge_artifacts.published(artifact.path, ge_file, deployment=ROW, limits=limits)


def test_a_directory_of_artifacts_becomes_a_table(artifact, ge_file):
    longer(artifact, ge_file)
    shown = prediction.predictions(artifact.path.parent, 2.5)
    ((line),) = shown.rows
    cost = step_cost(longer(artifact, ge_file), ge_artifacts.entry(artifact), 65536 + 512)
    assert (line["deployment"], line["batch"], line["context"], line["target_ms"]) == (ROW, 4, 65536 + 512, 20)
    assert line["step_ms"] == cost.step_ms
    assert line["tpot_ms"] == pytest.approx(cost.step_ms / 2.5)
    shares = sum(line[name] for name in ("launch_share", "memory_share", "matrix_share", "collectives_share"))
    assert shares == pytest.approx(100 - 100 * cost.parts_ms["waiting"] / cost.step_ms)
    assert "1 of 1 rows publish a target and no measurement" in as_markdown(shown)


def test_a_published_acceptance_is_taken_before_the_assumed_one(artifact, ge_file):
    row = replace(deployment(ROW), measured={"tpot_ms": 10.0, "accept_length": 2.0})
    entry, cost = ge_artifacts.entry(artifact), step_cost(longer(artifact, ge_file), ge_artifacts.entry(artifact), 100)
    line = prediction.row_of(row, entry, cost, 3.0)
    assert (line["tpot_ms"], line["published_ms"]) == (cost.step_ms / 2, 10.0)
    assert "0 of 1 rows" in as_markdown(prediction.table([line], 3.0))


def test_what_does_not_follow_is_refused(artifact, tmp_path):
    row = deployment(ROW)
    with pytest.raises(SpecError, match=r"has decode buckets 1, 2, 4; .* has 20 requests in flight on each group"):
        prediction.bucket_of(deployment("qwen35-397b-a3x8-in3k5-out1k5-20ms"), artifact)
    with pytest.raises(SpecError, match="publishes no requests in flight"):
        prediction.bucket_of(replace(row, concurrency=None), artifact)
    with pytest.raises(SpecError, match="publishes no input and output lengths"):
        prediction.context_of(replace(row, input_len=None))
    with pytest.raises(SpecError, match="has no artifacts; build them with"):
        prediction.predictions(tmp_path / "empty", 2.5)
