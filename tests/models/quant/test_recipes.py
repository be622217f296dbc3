"""models/quant/recipes.py: each recipe names formats that are, for matrices that a model has."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.models.quant.formats import PLAIN
from npucompile.models.quant.recipes import SCHEMES, formats_of_scheme


def test_a_scheme_that_is_not_there_is_refused() -> None:
    with pytest.raises(SpecError, match="quantization is 'int3'; legal are none, w8a8, w8a8-all, w4a8, w4a8-all, w4a16"):
        formats_of_scheme("int3", "qwen3.5-397b")
    assert formats_of_scheme("none", "qwen3.5-397b") == PLAIN


@pytest.mark.parametrize(
    ("model", "scheme", "wanted"),
    [
        (
            "qwen3.5-397b",
            "w4a8",
            {"self_attn.q_proj": "w8a8_dynamic", "self_attn.o_proj": "float", "mlp.experts.down_proj": "w4a8_dynamic"},
        ),
        ("qwen3.5-397b", "w4a8", {"mlp.shared_expert.down_proj": "float", "linear_attn.in_proj_z": "float", "mlp.gate": "float"}),
        ("qwen3.5-27b", "w8a8", {"self_attn.o_proj": "w8a8_dynamic", "mlp.down_proj": "w8a8_dynamic", "linear_attn.in_proj_z": "float"}),
        (
            "qwen3.5-27b",
            "w8a8",
            {"linear_attn.out_proj": "float", "mtp.self_attn.o_proj": "w8a8_dynamic", "mtp.mlp.up_proj": "w8a8_dynamic"},
        ),
        ("qwen3.6-27b", "w8a8", {"linear_attn.in_proj_z": "w8a8_dynamic", "linear_attn.in_proj_b": "float"}),
        (
            "qwen3.5-397b",
            "w4a8",
            {"visual.attn.qkv": "w8a8_dynamic", "visual.mlp.linear_fc1": "w8a8_dynamic", "visual.mlp.linear_fc2": "float"},
        ),
        ("qwen3.5-397b", "w8a8", {"visual.attn.proj": "w8a8_dynamic", "visual.mlp.linear_fc2": "w8a8_dynamic", "visual.norm1": "float"}),
        ("qwen3.6-27b", "w8a8", {"visual.attn.qkv": "w8a8_dynamic", "visual.mlp.linear_fc2": "w8a8_dynamic", "visual.norm2": "float"}),
        ("qwen3.5-27b", "w8a8", {"visual.attn.qkv": "float", "visual.mlp.linear_fc1": "float"}),
        ("qwen3.5-122b-a10b", "w8a8", {"visual.attn.qkv": "float", "visual.mlp.linear_fc1": "float"}),
        ("qwen3-32b", "w8a8", {"self_attn.o_proj": "w8a8_dynamic", "mlp.gate_proj": "w8a8_dynamic", "mlp.down_proj": "float"}),
        ("qwen3-30b-a3b", "w8a8", {"self_attn.o_proj": "w8a8", "mlp.experts.down_proj": "w8a8_dynamic", "mlp.gate": "float"}),
        (
            "deepseek-r1",
            "w4a8",
            {
                "self_attn.q_a_proj": "w8a8_dynamic",
                "self_attn.kv_a_proj_with_mqa": "w8a8_dynamic",
                "self_attn.kv_b_proj": "float",
                "mlp.shared_experts.up_proj": "w8a8_dynamic",
                "mlp.experts.down_proj": "w4a8_dynamic",
                "mlp.gate": "float",
                "eh_proj": "float",
            },
        ),
        (
            "deepseek-v3.2",
            "w8a8",
            {"self_attn.q_a_proj": "w8a8", "self_attn.indexer.wq_b": "float", "mlp.experts.down_proj": "w8a8_dynamic"},
        ),
        ("deepseek-v3.2", "w4a8", {"self_attn.q_a_proj": "float", "self_attn.q_b_proj": "w8a8_dynamic", "self_attn.indexer.wk": "float"}),
        ("qwen3-coder-480b-a35b", "w4a8", {"self_attn.q_proj": "w8a8", "mlp.experts.down_proj": "w4a8_dynamic"}),
        ("somebody's own", "w8a8", {"self_attn.o_proj": "w8a8_dynamic", "mlp.up_proj": "w8a8_dynamic", "mlp.gate": "float"}),
        (
            "qwen3-30b-a3b",
            "w4a16",
            {"self_attn.o_proj": "w4a16", "mlp.experts.gate_up_proj": "w4a16", "mlp.gate": "float", "lm_head": "float"},
        ),
        (
            "qwen3.5-397b",
            "w8a8-all",
            {
                "linear_attn.in_proj_qkv": "w8a8_dynamic",
                "linear_attn.in_proj_b": "float",
                "linear_attn.out_proj": "w8a8_dynamic",
                "mtp.self_attn.o_proj": "w8a8_dynamic",
                "mlp.gate": "float",
                "mlp.shared_expert_gate": "float",
            },
        ),
        (
            "qwen3.5-397b",
            "w4a8-all",
            {
                "linear_attn.in_proj_qkv": "w8a8_dynamic",
                "linear_attn.in_proj_b": "float",
                "mlp.experts.gate_up_proj": "w4a8_dynamic",
                "mtp.mlp.experts.gate_up_proj": "w8a8_dynamic",
            },
        ),
        ("somebody's own", "w4a8", {"mlp.experts.gate_up_proj": "w4a8_dynamic", "mlp.shared_expert.up_proj": "w8a8_dynamic"}),
    ],
)
def test_recipes_are_the_published_ones(model: str, scheme: str, wanted: dict[str, str]) -> None:
    formats = formats_of_scheme(scheme, model)
    layers = {"mtp": "mtp.layers.0", "visual": "model.visual.blocks.7"}
    found = {}
    for name in wanted:
        part, _, rest = name.partition(".")
        found[name] = formats.of([f"{layers[part]}.{rest}" if part in layers else f"model.layers.7.{name}"])
    assert found == wanted
    assert "none" in SCHEMES


@pytest.mark.parametrize("model", ["qwen3.5-397b", "qwen3-next-80b-a3b", "somebody's own"])
def test_draft_heads_stay_float(model: str) -> None:
    assert formats_of_scheme("w8a8", model).of(["mtp.layers.0.self_attn.q_proj.weight"]) == "float"


@pytest.mark.parametrize(
    ("model", "layers", "floats", "wide"),
    [("qwen3-30b-a3b", 48, set(), set(range(41, 48))), ("qwen3-coder-480b-a35b", 62, {*range(5), *range(57, 62)}, set())],
)
def test_layers_whose_experts_keep_more_bits(model: str, layers: int, floats: set[int], wide: set[int]) -> None:
    formats = formats_of_scheme("w4a8", model)
    found = {layer: formats.of([f"model.layers.{layer}.mlp.experts.down_proj"]) for layer in range(layers)}
    wanted = {**dict.fromkeys(range(layers), "w4a8_dynamic"), **dict.fromkeys(floats, "float"), **dict.fromkeys(wide, "w8a8_dynamic")}
    assert found == wanted
    assert (formats.group, formats_of_scheme("w8a8", model).group) == (64 if wide else 0, 0)


def test_the_dense_recipe_leaves_ten_matrices_float() -> None:
    formats = formats_of_scheme("w8a8", "qwen3-32b")
    down = {layer for layer in range(64) if formats.of([f"model.layers.{layer}.mlp.down_proj"]) == "float"}
    assert down == {1, 2, 6, 7, 11, 43, 44, 45, 62}
    floats = {
        (layer, side) for layer in range(64) for side in ("gate", "up") if formats.of([f"model.layers.{layer}.mlp.{side}_proj"]) == "float"
    }
    assert floats == {(2, "gate")}
