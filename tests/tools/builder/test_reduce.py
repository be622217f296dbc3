"""tools/builder/reduce.py: a small model has the layers and heads of the large one, so that every mesh of the large one splits it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support import tiny

from npucompile.graphs import tree
from npucompile.models import checkpoint, config_fields, registry
from npucompile.models.presets import PRESETS
from npucompile.models.quant.description import formats_in
from npucompile.tools.builder import deployments
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.reduce import reduced_config, write_reduced

SAME = ("layer_kinds", "split_heads", "num_key_value_heads", "num_experts_per_tok")

TOKENIZED = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def small(name):
    bundled = json.loads(registry.find("qwen3.5-tiny").text)
    return registry.from_config(name, reduced_config(PRESETS[name], registry.find(name).model.family.widths, bundled))


@pytest.mark.parametrize("name", PRESETS)
def test_layers_and_heads_stay_and_widths_shrink(name):
    large, model = registry.find(name).model, small(name)
    for field in SAME:
        assert getattr(model.config, field) == getattr(large.config, field), field
    assert model.has_draft_head == large.has_draft_head
    sizes = [sum(param.aval.nbytes for _, param in tree.flatten(m.params(torch.bfloat16))) for m in (model, large)]
    assert sizes[0] * 50 < sizes[1]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if number % 3 else ()) for number, name in enumerate(PRESETS)])
def test_the_meshes_of_published_deployments_split_it(name, monkeypatch):
    source = replace(registry.find(name), name=f"{name}-reduced", model=small(name))
    monkeypatch.setattr(planning.registry, "find", lambda name, family: source)
    rows = [row for row in deployments.deployments().values() if row.model == name]
    meshes = {(row.target, str(row.phase(phase).mesh)) for row in rows for phase in row.phases} | {("ascend-a3", "dp=2,tp=2")}
    for target, mesh in meshes:
        options = planning.Options(source.name, buckets=(2,), target=target, mesh=mesh, quantization="w4a8" if "397" in name else "w8a8")
        assert str(planning.plan(options).mesh) == mesh


def test_what_is_written_can_be_built_from(tmp_path):
    directory = write_reduced("qwen3.5-tiny", tmp_path / "small", seed=1)
    source = registry.find(str(directory))
    assert source.tokenizer is not None
    assert source.eos_ids == registry.find("qwen3.5-tiny").eos_ids
    written = load_file(directory / "model.safetensors")
    assert any(name.startswith("mtp.") for name in written)
    assert all(torch.isfinite(tensor).all() for tensor in written.values())


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": None, "rope_theta": 1e4},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "quantize": "w8a8"},
        {"intermediate_size": None},
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_whatever_file_is_read_is_reduced(tmp_path, change, wrapped):
    """Fields that are null are absent, a wrapped file becomes one of its text model, and floats have no label of a quantisation."""
    large = tiny.write_checkpoint(tmp_path / "large", **change)
    values = json.loads((large / "config.json").read_text()) | dict.fromkeys(name for name, value in change.items() if value is None)
    values = {"model_type": "qwen3_5_moe", "tie_word_embeddings": True, "text_config": values} if wrapped else values
    (large / "config.json").write_text(json.dumps(values))
    (large / "model.safetensors").unlink()
    directory = write_reduced(str(large), tmp_path / "small")
    source = registry.find(directory)
    assert source.model.config.tie_word_embeddings is wrapped
    assert source.model.config.layer_kinds == registry.find(large).model.config.layer_kinds
    assert formats_in(directory) is None
    assert not config_fields.STORAGE & set(json.loads(source.text))
    checkpoint.ParamReader(checkpoint.open_checkpoint(directory), replace(source.model, drafting=True).params(torch.float32))


def test_fields_of_a_family_with_other_names_are_left_alone():
    values = reduced_config({"model_type": "mine", "d_model": 4096}, {"d_model": 128}, {name: 1 for name in TOKENIZED})
    assert values["d_model"] == 128
    assert "head_dim" not in values
