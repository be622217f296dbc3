"""tools/builder/drafts.py: a deployment that drafts has a draft model, or the build says that it has none."""

from __future__ import annotations

import itertools
import json

import pytest
from support import headless, quantised

from npucompile.graphs.errors import SpecError
from npucompile.models import registry
from npucompile.models.checkpoint import ParamReader, open_checkpoint
from npucompile.models.presets import PRESETS
from npucompile.tools.builder import deployments
from npucompile.tools.builder.drafts import choose_draft_model
from npucompile.tools.builder.plan import Options, plan

WITHOUT = "minimax-m2"
"""Drafts with heads whose configuration nobody has published."""
ROWS = [row for row in deployments.deployments().values() if row.num_speculative_tokens and row.model in registry.presets()]
DRAFTING = [row.id for row in ROWS if row.model != WITHOUT]


@pytest.mark.parametrize("name", DRAFTING)
def test_every_published_deployment_that_drafts_can_draft(name):
    row = deployments.deployment(name)
    assert choose_draft_model(None, registry.find(row.model), row, None).model.has_draft_head


@pytest.mark.parametrize("name", [row.id for row in ROWS if row.model == WITHOUT])
def test_a_deployment_whose_draft_model_is_not_known_drafts_nothing_and_says_so(name):
    planned = plan(Options(WITHOUT, deployment=name, backend="null"))
    assert planned.limits.drafts == 0
    assert any(said.startswith("no drafts: the deployment drafts 3 tokens with a second checkpoint") for said in planned.notes)


def test_the_choice_is_said_and_may_be_refused():
    row = "qwen3-32b-a3x2-mix-2k-2k-50ms"
    chosen = plan(Options("qwen3-32b", deployment=row, backend="null"))
    assert chosen.limits.drafts == 3
    note = "draft model qwen3-32b-eagle3: the deployment drafts 3 tokens with a second checkpoint, which it does not name"
    assert any(said.startswith(note) for said in chosen.notes)
    assert chosen.arguments[chosen.arguments.index("--draft-model") + 1] == "qwen3-32b-eagle3"
    none = plan(Options("qwen3-32b", deployment=row, backend="null", num_speculative_tokens=0))
    assert (none.source.draft, none.limits.drafts) == (None, 0)


def test_a_checkpoint_without_a_draft_model_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["qwen3-32b"])))
    planned = plan(Options(str(tmp_path), deployment="qwen3-32b-a3x2-mix-2k-2k-50ms", backend="null"))
    said = "no drafts: the deployment drafts 3 tokens with a second checkpoint, which it does not name (--draft-model to name one)"
    assert (planned.source.draft, said in planned.notes) == (None, True)


@pytest.mark.parametrize("name", headless.MODELS)
def test_a_head_that_no_tensor_is_of_drafts_nothing_in_any_layout(tmp_path, name):
    """As transformers saves it, and in ModelSlim's layout, where the configuration may declare the head, too."""
    directory = headless.write(tmp_path / "floats", name)
    declaring = (directory / "config.json").read_text()
    written = quantised.quantised(registry.find(directory), tmp_path / "int8", "w8a8").checkpoint_dir
    assert not registry.find(written).model.has_draft_head, "what is written declares no head"
    (tmp_path / "int8" / "config.json").write_text(declaring)
    for place in (directory, written):
        source = registry.find(place)
        assert (source.model.has_draft_head, source.has_draft_head) == (True, False)
        chosen = plan(Options(str(place), backend="eager", dtype="float32"))
        assert (chosen.limits.drafts, chosen.model.drafting) == (0, False)
        assert "no drafts: the checkpoint has no tensor of the draft head that its configuration declares" in chosen.notes
        assert dict(chosen.decided_by)["speculative-tokens"] == "checkpoint"
        ParamReader(open_checkpoint(place), chosen.model.params(chosen.dtype))
        fields = " or ".join(source.model.family.draft_head.declared_by)
        with pytest.raises(
            SpecError, match=rf"--speculative-tokens 2: config.json of .* declares a draft head \({fields}\), and no tensor"
        ):
            plan(Options(str(place), backend="eager", num_speculative_tokens=2))


def options(model="qwen3.5-tiny", **chosen):
    return Options(model, **{"backend": "eager", "draft_vocab_size": 300, **chosen})


def test_a_build_that_drafts_from_few_tokens_is_repeated_by_its_arguments_and_takes_the_memory_of_their_rows():
    few, all_tokens = plan(options()), plan(options(draft_vocab_size=None))
    assert few.arguments[few.arguments.index("--draft-vocab-size") + 1] == "300"
    assert "--draft-vocab-size" not in all_tokens.arguments
    config = few.source.model.config
    assert few.params_bytes - all_tokens.params_bytes == 300 * config.hidden_size * few.dtype.itemsize


@pytest.mark.parametrize(
    "chosen, complaint",
    [
        ({"num_speculative_tokens": 0}, "legal is a build with --speculative-tokens of at least 1"),
        ({"draft_vocab_size": 2**20}, "legal are 1 to "),
        ({"model": "qwen3-32b", "draft_model": "qwen3-32b-eagle3", "target": "ascend-a3", "mesh": "tp=4", "backend": "null"}, "its own"),
        (
            {"model": "qwen3.5-27b", "target": "ascend-a3", "mesh": "tp=4", "backend": "null", "draft_vocab_size": 30002},
            "multiples of the 4",
        ),
    ],
)
def test_a_draft_vocabulary_that_cannot_be_is_refused(chosen, complaint):
    with pytest.raises(SpecError, match=r"--draft-vocab-size \d+.*" + complaint.replace("its own", "has a vocabulary of its own")):
        plan(options(**chosen))


def test_a_build_that_names_nothing_has_steps_of_several_widths(tiny_checkpoint):
    def widths(planned):
        return {bucket.q_len for bucket in planned.buckets if bucket.kind == "decode"}

    own = {"dtype": "float32", "backend": "eager"}
    chosen = plan(Options(str(tiny_checkpoint), **own))
    assert widths(chosen) == {1, 2, 4}
    assert any("steps draft 0, 1, 3 tokens, as many as pay (--draft-widths to change)" in note for note in chosen.notes)
    assert ("--draft-widths", "1,2,4") in list(itertools.pairwise(chosen.arguments))
    assert widths(plan(Options(str(tiny_checkpoint), buckets=(1,), **own))) == {4}
    assert widths(plan(Options(str(tiny_checkpoint), num_speculative_tokens=1, **own))) == {1, 2}
    assert widths(plan(Options(str(tiny_checkpoint), num_speculative_tokens=0, **own))) == {1}


def test_recurrent_states_of_npus_have_one_width(tiny_checkpoint):
    own = {"target": "ascend-a3", "mesh": "tp=2", "buckets": (2,), "backend": "null", "draft_widths": (1, 4)}
    with pytest.raises(SpecError, match=r"--draft-widths 1,4 on ascend-a3: .* has recurrent states, .*; legal is 4"):
        plan(Options(str(tiny_checkpoint), **own))
    several = plan(Options("qwen3-32b", draft_model="qwen3-32b-eagle3", **own))
    assert [bucket.name for bucket in several.buckets[-2:]] == ["decode-b2-q1", "decode-b2-q4"]
