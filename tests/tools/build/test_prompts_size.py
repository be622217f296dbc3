"""tools/build/prompts_size.py: a prefill step of a deployment has its row's prompts, or as many as fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.manifest import GraphEntry
from npucompile.tools.build import plan as planning
from npucompile.tools.build import prompts_size
from npucompile.tools.build.plan import Options, Plan
from npucompile.tools.build.prompts_size import fit_prompts

ROW = "qwen3-32b-a3x4-mix-6k-1.5k-18ms"
GIB = 2**30


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planning.plan(Options("qwen3-32b", deployment=ROW))


def prefills(plan: Plan) -> list[str]:
    return [bucket.name for bucket in plan.buckets if bucket.kind == "prefill"]


def test_all_prompts_of_the_row_fit(plan: Plan) -> None:
    assert fit_prompts(plan) == plan
    assert prefills(plan) == ["prefill-b1-q6016", "prefill-b5-q6016"]


@pytest.mark.parametrize("prompts", [4, 2, 1])
def test_fewer_prompts_are_said(plan: Plan, prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(plan: Plan, bucket: Bucket) -> GraphEntry:
        # Activations of as much memory as weights and pools leave, for that many prompts.
        peak = {"peak_bytes": bucket.batch * int(38 * GIB / prompts)}
        return GraphEntry(bucket, (), (), None, "", "", None, {}, peak, (), {})

    monkeypatch.setattr(prompts_size, "partitioned_entry", entry)
    fitted = fit_prompts(plan)
    assert prefills(fitted) == ["prefill-b1-q6016", *([f"prefill-b{prompts}-q6016"] if prompts > 1 else [])]
    assert fitted.buckets[-4:] == plan.buckets[-4:]
    (note,) = set(fitted.notes) - set(plan.notes)
    assert note.startswith(f"differs from the deployment: a prefill step takes at most {prompts} of 5 prompts: with all of them a rank")
    assert note.endswith("of 64 GiB")


def test_others_are_left_alone(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_size, "partitioned_entry", None)
    for other in (replace(plan, deployment=""), replace(plan, buckets=plan.buckets[:1]), replace(plan, buckets=plan.buckets[2:])):
        assert fit_prompts(other) == other
