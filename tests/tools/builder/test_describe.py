"""tools/builder/describe.py: manifests of different targets differ only in what the target decides."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from support import tiny

from npucompile.graphs.errors import CheckpointError
from npucompile.lowering.artifact.artifact import ArtifactWriter, Manifest
from npucompile.models.safetensors_files import digest, open_checkpoint
from npucompile.tools.builder.describe import describe


def test_targets_differ_in_what_their_rows_say_and_in_nothing_else(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "npu", **tiny.NPU_SIZES)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    local, device = map(tiny.described, (tiny.planned(model), tiny.planned_device(model)))
    differing = {field.name for field in fields(Manifest) if getattr(local, field.name) != getattr(device, field.name)}
    assert differing == {
        "backend", "build_arguments", "decided_by", "dtype", "limits", "mesh", "params", "platform", "rules", "state", "target",
        "toolchain", "weights",
    }  # fmt: skip
    assert (local.target, local.backend, device.target, device.backend) == ("cpu", "eager", "ascend-a3", "ge")
    assert None not in (local.weights, device.weights, local.tokenizer, local.chat_template)
    assert (local.model["special_tokens"], local.model["sampling"]) == ({"bos_token": "<s>"}, {"temperature": 0.5})
    assert device.toolchain.items() > local.toolchain.items()


def test_a_bound_checkpoint_is_named_and_not_copied(tmp_path, monkeypatch):
    model = tiny.write_checkpoint(tmp_path / "npu", **tiny.NPU_SIZES)
    monkeypatch.chdir(tmp_path)
    with ArtifactWriter(tmp_path / "out") as writer:
        manifest = describe(tiny.planned_device(Path("npu"), weights="bound"), writer, tiny.QUIET)
        assert not list(writer.root.glob("weights/*"))
    assert (manifest.checkpoint, manifest.weights) == (str(model), None)
    assert manifest.source_digest == digest(open_checkpoint(model))


def test_a_bound_checkpoint_that_does_not_fit_is_refused_before_anything_is_lowered(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "npu", **tiny.NPU_SIZES)
    (model / "config.json").write_text(json.dumps({**tiny.CONFIG, **tiny.NPU_SIZES, "num_experts": 16}))
    with pytest.raises(CheckpointError, match="has a wrong shape"):
        tiny.described(tiny.planned_device(model, weights="bound"))
