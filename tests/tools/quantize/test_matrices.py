"""tools/quantize/matrices.py: which matrices are chosen, and under which names they are written."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file
from support import quantised

from npucompile.graphs.errors import CheckpointError, SpecError
from npucompile.models import registry
from npucompile.models.quant.formats import Formats
from npucompile.models.safetensors_files import open_checkpoint
from npucompile.tools.quantize.matrices import check_patterns, checked_model, formats_for, select, without_static


def test_patterns_come_before_the_recipe_and_drafts_stay_float():
    formats = formats_for("w4a8", "Qwen3.5-397B", keep=("*.layers.0.*",), static=("*.self_attn.?_proj",), group=64)
    forms = {
        "model.layers.0.self_attn.q_proj": "float",
        "model.layers.1.self_attn.q_proj": "w8a8",
        "model.layers.1.mlp.experts.gate_up_proj": "w4a8_dynamic",
        "model.layers.1.mlp.shared_expert.up_proj": "float",
        "mtp.layers.0.self_attn.q_proj": "float",
    }
    assert {name: formats.of([name]) for name in forms} == forms
    assert formats.group == 64
    assert without_static(formats).of(["model.layers.1.self_attn.q_proj"]) == "w8a8_dynamic"


def test_names_of_the_float_checkpoint_stay_and_experts_are_written_one_by_one(tmp_path):
    source = quantised.write(tmp_path, "moe")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    matrices = select(checked_model(source.model, checkpoint), checkpoint, formats_for("w8a8", "none such"))
    layer = {m.stem.removeprefix("model.language_model.layers.1."): m for m in matrices if ".layers.1." in m.stem}
    experts = [f"mlp.experts.{e}.{part}_proj" for e in range(4) for part in ("gate", "up", "down")]
    others = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")]
    assert set(layer) == {*experts, *others}
    assert {m.group_name for name, m in layer.items() if name in experts} == {
        f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down")
    }
    assert [name for name, m in layer.items() if m.row and name in others] == ["self_attn.o_proj", "mlp.shared_expert.down_proj"]
    up, fused = layer["mlp.experts.2.up_proj"], renamed["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    assert up.read().equal(fused[2, 16:])
    assert up.shape == (16, 32)


def test_what_cannot_have_a_format_is_refused(tmp_path):
    source = quantised.write(tmp_path, "moe")
    checkpoint = open_checkpoint(tmp_path)
    model = checked_model(source.model, checkpoint)
    for pattern, form, error, message in (
        ("*norm", "w8a8_dynamic", SpecError, "it is no matrix of a product, legal is float"),
        ("*.experts.*", "w8a8", SpecError, "experts have a scale for each token, legal is w8a8_dynamic"),
    ):
        with pytest.raises(error, match=message):
            select(model, checkpoint, Formats(((pattern, form),)))
    with pytest.raises(SpecError, match=r"no matrix is named '\*.embed_tokens'"):
        check_patterns(model, ["*.o_proj", "lm_head", "*.embed_tokens"])
    values = json.loads(source.text) | {"moe_intermediate_size": 24}
    odd = quantised.tiny.write_checkpoint(tmp_path / "odd", **values)
    wide = registry.find(odd)
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.down_proj has a contraction of 24; of an int4 matrix legal are multiples of 16"
    ):
        select(checked_model(wide.model, open_checkpoint(odd)), open_checkpoint(odd), formats_for("w4a8", "any"))
