"""tools/inspection/legality.py: inspect shows what is illegal in a bucket, and what its graphs assume."""

from __future__ import annotations

import json

import pytest
from support import ge_artifacts, legal_graph, ranks, small_images, tiny
from support.legal_graph import edited

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.inspection import legality

PLATFORM = {"chip": "ascend910_93", "cann": "9.0", "packages": []}


@pytest.fixture(scope="module")
def ge_file(tmp_path_factory):
    return legal_graph.legal(tmp_path_factory.mktemp("stubs"))


def test_illegal_is_empty_for_a_legal_graph(own_artifact, ge_file, tmp_path):
    artifact = ge_artifacts.published(own_artifact, ge_file, platform=PLATFORM)
    told = json.loads(tiny.cli(tmp_path, "inspect", artifact.path, "--bucket", "4", "--json").stdout)
    assert told["buckets"][0]["illegal"] == []


def test_illegal_names_what_cann_refuses(own_artifact, ge_file):
    wrong = edited(ge_file, lambda first: setattr(first["MoeGatingTopK"].attr["renorm"], "i", 5))
    artifact = ge_artifacts.published(own_artifact, wrong, platform=PLATFORM)
    (told,) = legality.illegal(artifact, ge_artifacts.entry(artifact))["illegal"]
    assert told["type"] == "MoeGatingTopK"
    assert told["message"] == "renorm is 5; legal are 0"
    assert told["operators"] == 1


def test_assumptions(own_artifact, ge_file, tmp_path):
    artifact = ge_artifacts.published(own_artifact, ge_file, platform=PLATFORM)
    told = json.loads(tiny.cli(tmp_path, "inspect", artifact.path, "--assumptions", "--json").stdout)
    shown = tiny.cli(tmp_path, "inspect", artifact.path, "--assumptions").stdout.splitlines()
    assert shown[0] == f"{len(told)} assumptions on CANN 9.0 and ascend910_93 that no public source covers"
    assert len(shown) == len(told) + 1
    assert {row["operator"] for row in told} >= {"MatMul", "Add"}
    assert all(set(row) == {"operator", "what", "assumed", "operators"} for row in told)


def test_captured_graphs_are_checked_as_well(tmp_path_factory, tmp_path):
    artifact = small_images.shipped(ranks.SIZES, tmp_path_factory, backend="aclgraph")
    (bucket,) = json.loads(tiny.cli(tmp_path, "inspect", artifact.path, "--bucket", "4", "--json").stdout)["buckets"]
    assert [row["message"] for row in bucket["illegal"] if not row["sizes"]] == []
    assert 0 < bucket["launches"] < bucket["operators"]
    told = json.loads(tiny.cli(tmp_path, "inspect", artifact.path, "--assumptions", "--json").stdout)
    assert all(row["operators"] > 0 and row["assumed"] for row in told)
    assert {row["operator"] for row in told if row["what"] == "call"} >= {"GroupedMatmul", "HcomReduceScatter"}


def test_artifacts_without_graphs_for_npus(own_artifact):
    with pytest.raises(SpecError, match="has no graphs for NPUs, of which --assumptions tells"):
        legality.assumed(Artifact.open(own_artifact), Artifact.open(own_artifact).manifest.graphs)
