"""tools/builder/instance.py: deployments, the options that override them, and builds for this machine."""

from __future__ import annotations

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Mesh
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.instance import DEFAULT_DRAFTS, phases, resolve
from npucompile.tools.builder.plan import Options

BIG, PUBLISHED = "qwen3.5-397b", "qwen35-397b-a3x8-in3k5-out1k5-50ms"
SPLIT = "qwen35-397b-a3x24-pd-1p1d-3node"


def decided(model=BIG, has_draft_head=True, **options):
    return resolve(Options(model, **options), model, has_draft_head)


@pytest.mark.parametrize("options", [{"target": "cpu"}, {"mesh": "dp=2"}, {"target": "cpu", "mesh": "dp=2,tp=2"}, {"backend": "null"}])
def test_who_says_another_place_does_not_get_the_default(options):
    instance = decided(**options)
    assert (instance.target.name, instance.deployment, instance.limits) == ("cpu", "", None)


def test_what_is_said_beside_a_row_wins():
    instance = decided(deployment=PUBLISHED, mesh="dp=4,tp=4", quantization="w8a8", num_speculative_tokens=1)
    assert (str(instance.mesh), instance.quantization, instance.drafts, instance.deployment) == ("dp=4,tp=4", "w8a8", 1, PUBLISHED)
    assert (instance.limits.slots_per_request, instance.limits.drafts) == (2, 1)
    none = decided(deployment=PUBLISHED, num_speculative_tokens=0)
    assert (none.drafts, none.limits.slots_per_request, none.limits.drafts) == (0, 1, 0)
    assert decided(deployment=PUBLISHED, target="ascend-a2").target.name == "ascend-a2"


def test_a_target_alone_has_one_rank_and_no_sizes():
    instance = decided("any", target="ascend-a3")
    assert (instance.mesh, instance.quantization, instance.drafts) == (Mesh(), "none", DEFAULT_DRAFTS)
    assert (instance.limits, instance.buckets, instance.deployment) == (None, None, "")
    assert decided("any", target="ascend-a3", has_draft_head=False).drafts == 0
    assert decided("any", target="ascend-a3", num_speculative_tokens=0).drafts == 0


def test_a_model_without_a_draft_head_drafts_nothing():
    for place in ({"target": "ascend-a3"}, {"deployment": PUBLISHED}):
        instance = decided(**place, has_draft_head=False)
        assert instance.drafts == decided(**place, has_draft_head=False, num_speculative_tokens=0).drafts == 0
        assert instance.limits is None or (instance.limits.drafts, instance.limits.slots_per_request) == (0, 1)
        with pytest.raises(SpecError, match=rf"--speculative-tokens 2: {BIG} has no draft head; legal is 0"):
            decided(**place, has_draft_head=False, num_speculative_tokens=2)


def test_phases_are_the_artifacts_a_deployment_needs():
    assert phases(None, BIG) == phases(PUBLISHED, BIG) == ("mixed",)
    assert phases(SPLIT, BIG) == ("prefill", "decode")
    assert phases(None, "qwen3.5-tiny") == ("mixed",)
    with pytest.raises(SpecError, match="is not known"):
        phases("nothing-like-it", BIG)


def test_sizes_without_weights_only_report():
    with pytest.raises(SpecError, match=r"qwen3\.5-27b is a set of sizes without weights.*--backend null"):
        planning.plan(Options("qwen3.5-27b", backend="eager"))
    plan = planning.plan(Options("qwen3.5-27b", backend="null", dtype="bfloat16"))
    assert plan.params_bytes > 50e9


def test_a_mesh_on_this_machine_runs_uncompiled(tiny_checkpoint):
    plan = tiny.planned(tiny_checkpoint, backend=None, mesh="dp=2,tp=1")
    assert (plan.backend, plan.target.name, str(plan.mesh), plan.target.local) == ("eager", "cpu", "dp=2,tp=1", True)
    assert plan.model.config.variant.grouped
    assert not tiny.planned(tiny_checkpoint, backend=None).model.config.variant.grouped
    with pytest.raises(SpecError, match=r"--backend inductor with mesh dp=2: .* legal are eager and null"):
        tiny.planned(tiny_checkpoint, backend="inductor", mesh="dp=2")
