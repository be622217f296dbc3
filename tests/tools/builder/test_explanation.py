"""tools/builder/explanation.py: every setting of an artifact has a value, a decider and what changes it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.builder.explanation import explanation
from npucompile.tools.builder.settings.record import DECIDERS
from npucompile.tools.builder.settings.table import EXPLAINED


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    model = tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    out = tmp_path_factory.mktemp("built") / "out"
    tiny.built(tiny.planned(model, buckets=(1, 2), backend="eager", max_logprobs=0), out)
    return Artifact.open(out).manifest


def test_every_setting_is_explained_by_who_decided_it(manifest):
    explained = {setting.name: setting for setting in explanation(manifest)}
    assert list(explained) == [name for name in EXPLAINED if name in explained]
    assert {setting.by for setting in explained.values()} <= set(DECIDERS)
    buckets = explained["buckets"]
    assert (buckets.value, buckets.by) == ("1,2", "flag")
    assert (buckets.what, buckets.why) == ("Decode steps take 1,2 requests.", "The build was told so with --buckets.")
    assert buckets.change.startswith("--buckets changes it: more of them")
    assert explained["max-num-seqs"].why == "The plan took as many as the largest bucket has rows."
    assert explained["target"].why == "It is the default."
    assert (explained["max-logprobs"].what, explained["weights"].value) == ("No request gets log probabilities.", "stored")
    assert "deployment" not in explained
    assert "cann" not in explained


def test_a_row_says_so_and_a_flag_goes_before_it(manifest):
    who = {**manifest.decided_by, "mesh": "row", "buckets": "checkpoint"}
    explained = {s.name: s for s in explanation(replace(manifest, deployment="some-row", decided_by=who, mesh="dp=2,tp=2"))}
    assert explained["mesh"].why == "The published deployment some-row says so."
    assert explained["mesh"].change.endswith("It goes before what --deployment says of --mesh.")
    assert explained["mesh"].what == "It runs on 4 ranks, mesh dp=2,tp=2."
    assert explained["buckets"].why == "The checkpoint says so."
    assert "of each dp group" in explained["max-num-seqs"].what


def test_why_nothing_is_drafted_is_said(manifest):
    """The configuration of this artifact declares a head."""
    who = {**manifest.decided_by, "speculative-tokens": "checkpoint"}
    none = replace(manifest, decided_by=who, limits=replace(manifest.limits, drafts=0, slots_per_request=1))
    config = json.dumps({**json.loads(manifest.model["config"]), "mtp_num_hidden_layers": 0})
    for artifact, why in (
        (none, "The checkpoint has no tensor of the draft head that its configuration declares."),
        (replace(none, model={**manifest.model, "config": config}), "The model has no draft head."),
    ):
        (said,) = (setting for setting in explanation(artifact) if setting.name == "speculative-tokens")
        assert (said.what, said.why) == ("Steps draft nothing.", why)
        assert said.change == "A checkpoint with a draft head, or --draft-model, changes it."


def test_an_artifact_that_records_nobody_says_so(manifest):
    assert {s.why for s in explanation(replace(manifest, decided_by={}))} == {
        "The artifact does not record who decided it; a new build does."
    }
