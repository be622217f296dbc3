"""tools/inspection/experts.py: plans by counts, what they come to, and the map that a build takes."""

from __future__ import annotations

import json
import random

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.artifact_model import full_model
from npucompile.tools.builder.expert_map import fitted, read
from npucompile.tools.builder.expert_planner import imbalance, planned
from npucompile.tools.inspection.cost import step_cost
from npucompile.tools.inspection.experts import as_map, plans, view

BUCKETS = ("decode-b2-q2", "prefill-b1-q4")


@pytest.fixture(scope="module")
def artifact(npu_artifact):
    return Artifact.open(npu_artifact("dp=2,tp=2"))


@pytest.fixture(scope="module")
def counts():
    draw = random.Random(2)
    return [[round(1000 * draw.lognormvariate(0, 1.5)) for _ in range(8)] for _ in range(2)]


def counted(rows):
    return read(json.dumps({"logical_count": rows}))


def test_each_plan_is_more_even_and_faster_by_the_cost_model(artifact, counts):
    built, moved, copied = found = plans(artifact, counted(counts), None)
    assert [plan.name for plan in found] == ["as built", "planned, 0 copies", "planned, 4 copies"]
    assert built.layers == (tuple(range(8)),) * 2
    assert moved.layers == planned(counts, 8, 4)
    assert copied.layers == planned(counts, 12, 4)
    assert [plan.imbalance for plan in found] == [imbalance(plan.layers, counts, 4) for plan in found]
    assert built.imbalance > moved.imbalance >= copied.imbalance
    for plan in found:
        assert set(plan.step_ms) == set(BUCKETS)
        entry = next(entry for entry in artifact.manifest.graphs if entry.bucket.name == "prefill-b1-q4")
        assert plan.step_ms["prefill-b1-q4"] == step_cost(artifact, entry, imbalance=plan.imbalance).step_ms
    # The parameter's own imbalance is that of the default estimate.
    assert step_cost(artifact, entry).step_ms == step_cost(artifact, entry, imbalance=2.1).step_ms
    assert all(built.step_ms[name] > moved.step_ms[name] >= copied.step_ms[name] for name in BUCKETS)
    shown = view(found)
    assert [row["imbalance"] for row in shown.data] == [plan.imbalance for plan in found]
    assert f"{copied.imbalance:.3f}" in shown.lines[-1]


def test_the_written_map_is_what_a_build_reads(artifact, counts):
    copied = plans(artifact, counted(counts), 8)[-1]
    text = json.dumps(as_map(artifact, copied.layers))
    assert fitted(read(text), full_model(artifact.manifest), 4).layers == copied.layers


def test_a_map_of_an_artifact_is_what_it_was_built_with(artifact, counts, tmp_path):
    text = json.dumps({"physical_to_logical_map": [[7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 1, 1]] * 2})
    plan = tiny.planned_device(artifact.manifest.build_arguments[0], buckets=(1, 2), max_model_len=128, expert_map=text)
    mapped = Artifact(tmp_path, tiny.described(plan), "")
    (built, *_) = plans(mapped, counted([*counts, counts[0]]), None)
    assert built.layers == ((7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 1, 1),) * 2 + ((*range(8), *range(4)),)
    assert built.step_ms == {}


def test_what_cannot_be_planned_is_refused(artifact, counts, npu_artifact):
    one = Artifact.open(npu_artifact(""))
    for target, rows, copies, message in (
        (artifact, {"physical_to_logical_map": [list(range(8))] * 2}, None, "says where experts are, not how often each was chosen"),
        (artifact, {"logical_count": counts}, 3, "8 experts and 3 copies on 4 ranks; legal is a sum that is a multiple of 4"),
        (artifact, {"logical_count": [counts[0][:7]] * 2}, None, "counts 7 experts, .* has 8"),
        (artifact, {"logical_count": counts[:1]}, None, "has 1 layers, .* has 2 with experts"),
        (one, {"logical_count": counts}, None, "has no experts that ranks share"),
    ):
        with pytest.raises(SpecError, match=message):
            plans(target, read(json.dumps(rows)), copies)
