"""tools/build/draft_choice.py: a deployment that drafts has a draft model, or the build says that it has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.models import registry
from npucompile.tools.build import deployments
from npucompile.tools.build.draft_choice import choose_draft_model
from npucompile.tools.build.plan import Options, plan

DRAFTING = [row.id for row in deployments.deployments().values() if row.num_speculative_tokens and row.model in registry.presets()]


@pytest.mark.parametrize("name", DRAFTING)
def test_every_published_deployment_that_drafts_can_draft(name):
    row = deployments.deployment(name)
    source, note = choose_draft_model(None, registry.find(row.model), row, None)
    assert source.model.has_draft_head
    assert (note is not None) == (source.draft is not None)


def test_the_choice_is_said_and_may_be_refused():
    row = "qwen3-32b-a3x2-mix-2k-2k-50ms"
    chosen = plan(Options("qwen3-32b", deployment=row, backend="null"))
    assert chosen.limits.drafts == 3
    note = "draft model qwen3-32b-eagle3: the deployment drafts 3 tokens with a second checkpoint, which it does not name"
    assert any(said.startswith(note) for said in chosen.notes)
    assert chosen.arguments[chosen.arguments.index("--draft-model") + 1] == "qwen3-32b-eagle3"
    none = plan(Options("qwen3-32b", deployment=row, backend="null", num_speculative_tokens=0))
    assert (none.source.draft, none.limits.drafts) == (None, 0)


def test_a_checkpoint_without_a_draft_model_is_said():
    row, here = deployments.deployment("qwen3-32b-a3x2-mix-2k-2k-50ms"), registry.find("qwen3.5-tiny").checkpoint_dir
    kept, note = choose_draft_model(None, replace(registry.find("qwen3-32b"), checkpoint_dir=here), row, None)
    assert kept.draft is None
    assert note == "no drafts: the deployment drafts 3 tokens with a second checkpoint, which it does not name (--draft-model to name one)"
