"""tools/build/backend_choice.py: the target's backend, where it can run the model on that mesh."""

from __future__ import annotations

import pytest
from support import tiny

from npucompile.graphs.errors import SpecError
from npucompile.tools.build import plan as planning
from npucompile.tools.build.plan import Options


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
