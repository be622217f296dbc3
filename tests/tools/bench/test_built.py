"""tools/bench/built.py: builds of deployments become tables of their graphs and memory, with what differs and what is missing."""

from __future__ import annotations

import pytest
from support import ge_artifacts
from support import ge_bodies as gb

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.ascend.link import link
from npucompile.tools.bench import built
from npucompile.tools.bench.built import Built
from npucompile.tools.build.deployments import deployment
from npucompile.tools.inspection.cost import step_cost

ROW = "qwen35-397b-a3x8-in64k-out1k-20ms"
GIB = 2**30
PARTS = dict.fromkeys(["expert weights", "other weights", "draft head", "KV pages", "state slots", "activations", "workspace"], GIB)


@pytest.fixture(scope="module")
def ge_file(tmp_path_factory):
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    return link(*gb.two_kinds(2), ta)


@pytest.fixture
def artifact(own_artifact, ge_file) -> Artifact:
    parts = [{"name": name, "nbytes": nbytes, "why": ""} for name, nbytes in {**PARTS, "communication": 0, "runtime": 2 * GIB}.items()]
    return ge_artifacts.published(own_artifact, ge_file, deployment=ROW, memory={"parts": parts, "limit_bytes": 64 * GIB})


def of(artifact: Artifact, name: str = ROW) -> Built:
    entry = ge_artifacts.entry(artifact)
    return Built(deployment(name), built.phase_of(artifact), artifact, [(entry, step_cost(artifact, entry))])


def test_a_build_is_shown_with_its_graphs_and_memory(artifact):
    text, each = built.report([of(artifact)]), of(artifact)
    ((entry, cost),) = each.graphs
    assert f"| {ROW} | {artifact.manifest.mesh} | w4a8 | {entry.bucket.name} | {sum(entry.census.values())} | {cost.launches} |" in text
    assert f"| {ROW} | {' | '.join(['1.00'] * len(PARTS))} | - | {len(PARTS) + 2}.0 | 64 |" in text
    differs, missing = text.split("**Not built**")
    assert f"- prompts are prefilled in chunks of 4096 tokens, published whole: {ROW}\n" in differs
    held = (artifact.manifest.limits.num_pages - 1) * 128
    assert f"- {held} cached tokens a dp group, where all its requests at full length take " in differs
    assert "no launch command is published: parameter values for comparison, not a launch line: dsv32-reference-values" in missing
    assert ROW not in missing
    assert built.context_for(deployment(ROW)) == 65536 + 512


def test_two_builds_of_one_phase_are_refused(artifact):
    with pytest.raises(SpecError, match=f"are both of {ROW}; legal is one of each deployment and phase"):
        built.report([of(artifact), of(artifact)])
