"""models/glm4_moe_lite.py: files say in three ways which layers have experts; equality with transformers is in test_decoder.py."""

from __future__ import annotations

import pytest
from support import oracle
from transformers import AutoConfig

from npucompile.models import deepseek_v3, glm4_moe_lite, registry

VALUES = {name: value for name, value in oracle.CASES["lite"].items() if name != "first_k_dense_replace"}


@pytest.mark.parametrize(
    "fields", [{}, {"first_k_dense_replace": 1}, {"mlp_layer_types": ["dense", "sparse", "sparse"]}], ids=["default", "number", "list"]
)
def test_the_first_layer_has_no_experts(fields):
    config = glm4_moe_lite.read_config({**VALUES, **fields})
    assert config.layer_kinds == ("dense", "moe", "moe")
    assert AutoConfig.for_model(**VALUES | fields).mlp_layer_types == ["dense", "sparse", "sparse"]
    plain = {**VALUES, "first_k_dense_replace": 1, "model_type": "deepseek_v3"}
    assert config == deepseek_v3.read_config(plain)


def test_more_dense_layers_and_the_published_spelling():
    assert glm4_moe_lite.read_config({**VALUES, "first_k_dense_replace": 2}).layer_kinds == ("dense", "dense", "moe")
    config = registry.find("glm-4.7-flash").model.config
    assert (config.layer_kinds.count("dense"), config.rotary.dim, config.num_nextn_predict_layers) == (1, 64, 1)
