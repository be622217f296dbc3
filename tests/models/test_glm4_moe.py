"""models/glm4_moe.py: fields are read and checked; equality with transformers is in test_decoder.py, of drafts in test_deepseek_v3.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import oracle

from npucompile.models import glm4_moe, registry
from npucompile.models.quant.formats import INT8_STATIC, Formats

VALUES = oracle.CASES["biased"]


def test_fields_are_read_and_have_transformers_defaults():
    config = glm4_moe.read_config(VALUES)
    assert (config.rotary.dim, config.attention_bias, config.use_qk_norm, config.layer_kinds) == (10, True, True, ("dense", *["moe"] * 3))
    optional = ("attention_bias", "use_qk_norm", "first_k_dense_replace", "rope_parameters")
    few = glm4_moe.read_config({**{name: value for name, value in VALUES.items() if name not in optional}, "rope_theta": 1e4})
    assert (few.rotary, few.layer_kinds) == (config.rotary, config.layer_kinds)
    assert (few.attention_bias, few.use_qk_norm) == (False, False)


@pytest.mark.parametrize(("name", "biased", "normed"), [("glm-4.7", True, True), ("glm-4.5-air", True, False)])
def test_projections_have_biases_and_heads_norms_as_published(name, biased, normed):
    model = registry.find(name).model
    layers = [*model.params(torch.bfloat16)["layers"], model.family.abstract_params(model.config, torch.bfloat16)["mtp"]["layer"]]
    assert all(("q_norm" in layer["mixer"]) == normed for layer in layers)
    names = {part for leaf in layers[3]["mixer"]["qkv"].values() for part in leaf.source.names}
    assert names == {f"model.layers.3.self_attn.{head}_proj.{kind}" for head in "qkv" for kind in ("weight", "bias")}
    assert layers[-1]["mixer"]["q"].biased == biased
    assert not layers[-1]["mixer"]["out"].biased


def test_a_cache_of_int8_is_the_checkpoints(tmp_path):
    config = registry.find("glm-4.7").model.config
    formats = Formats((), kv_cache=(("model.layers.*.self_attn", INT8_STATIC),))
    quantised = replace(config, variant=replace(config.variant, formats=formats))
    pools = glm4_moe.FAMILY.abstract_state(quantised, oracle.LIMITS, torch.bfloat16)
    assert {pool["k"].dtype for pool in [*pools["layers"], pools["mtp"]]} == {torch.int8}


def test_a_small_model_rotates_the_same_share_of_a_head():
    config = registry.find("glm-4.7").model.config
    small = glm4_moe.FAMILY.shrink(config, 8, 16)
    assert (small.rotary.dim * 2, small.layer_kinds) == (small.head_dim, ("dense", "moe", "moe"))
    assert small.attention_bias
    assert small.use_qk_norm
