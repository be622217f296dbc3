"""tools/build/weights_choice.py: what is stored, what is bound, and what leaves no choice."""

from __future__ import annotations

import json

import pytest
from support import tiny

from npucompile.graphs.errors import CheckpointError, SpecError
from npucompile.tools.build import weights_choice
from npucompile.tools.build.plan import Options, plan


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "npu", **tiny.NPU_SIZES)


def test_small_checkpoints_are_stored_and_large_ones_bound(model, monkeypatch):
    bytes_on_disk = (model / "model.safetensors").stat().st_size
    small = tiny.planned_device(model)
    assert small.weights == "stored"
    assert any("GB are copied into the artifact (--weights bound to read" in note for note in small.notes)
    monkeypatch.setattr(weights_choice, "STORED_BYTES", bytes_on_disk // 2)
    large = tiny.planned_device(model)
    assert large.weights == "bound"
    assert any(f"GB stay in {model}, which serving reads (--weights stored to copy them)" in note for note in large.notes)
    for choice in ("stored", "bound"):
        asked = tiny.planned_device(model, weights=choice)
        assert asked.weights == choice
        assert not any("weights" in note for note in asked.notes)
        assert asked.arguments[asked.arguments.index("--weights") + 1] == choice


def test_here_they_are_always_stored(model):
    for choice in (None, "auto", "stored"):
        here = tiny.planned(model, weights=choice)
        assert (here.weights, "--weights" in here.arguments) == ("stored", False)
    with pytest.raises(SpecError, match=r"--weights bound for cpu: .* legal is stored"):
        tiny.planned(model, weights="bound")


def test_what_has_no_weights_has_no_choice(model, tmp_path):
    preset = plan(Options("qwen3.5-27b", target="ascend-a3", mesh="tp=2"))
    assert (preset.weights, "--weights" in preset.arguments) == ("none", False)
    for choice in ("stored", "bound"):
        with pytest.raises(SpecError, match=rf"--weights {choice}: qwen3\.5-27b has no weights; legal is a path"):
            plan(Options("qwen3.5-27b", target="ascend-a3", mesh="tp=2", weights=choice))
    assert tiny.planned_device(model, backend="null").weights == "none"
    with pytest.raises(SpecError, match=r"weights is 'copied'; legal are auto, stored, bound"):
        tiny.planned_device(model, weights="copied")
    sizes = tmp_path / "sizes"
    sizes.mkdir()
    (sizes / "config.json").write_text(json.dumps({**tiny.CONFIG, **tiny.NPU_SIZES}))
    alone = tiny.planned_device(sizes)
    assert alone.weights == "none"
    assert any(f"no weights: {sizes} holds none of model.safetensors" in note for note in alone.notes)


def test_an_unreadable_checkpoint_is_refused_when_it_is_planned(model, tmp_path):
    broken = tiny.copied(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        tiny.planned_device(broken)
