"""models/presets.py: the sizes of the presets give the published parameter counts."""

from __future__ import annotations

import math

import pytest
import torch

from npucompile.graphs import tree
from npucompile.models import registry
from npucompile.models.presets import BUNDLED, PRESETS

# Text parameters without the draft head, and the draft head's own: counted by transformers 5.23 on the meta device.
COUNTS = {
    "qwen3.5-397b": (396_346_350_336, 6_595_568_128),
    "qwen3.5-27b": (26_895_998_464, 424_699_392),
    "qwen3.6-27b": (26_895_998_464, 424_699_392),
}


def count(params) -> int:
    return sum(math.prod(param.aval.shape) for _, param in tree.flatten(params))


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_are_the_published_ones(name):
    model = registry.find(name).model
    params = dict(model.family.abstract_params(model.config, torch.bfloat16))
    draft = count(params.pop("mtp"))
    assert (count(params), draft) == COUNTS[name]
    assert count(model.params(torch.bfloat16)) == COUNTS[name][0]


@pytest.mark.parametrize("name", PRESETS)
def test_published_shape(name):
    config = registry.find(name).model.config
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == list(range(3, len(config.layer_types), 4))
    assert (config.rotary.dim, config.rotary.theta, config.max_position_embeddings) == (64, 1e7, 262_144)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_reads_the_same_sizes(name):
    """The same fields through transformers' own configuration class give the same Config."""
    from transformers.models.qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

    values = {key: value for key, value in PRESETS[name].items() if key not in ("model_type", "architectures")}
    theirs = (Qwen3_5MoeTextConfig if "num_experts" in values else Qwen3_5TextConfig)(**values).to_dict()
    assert registry.from_config(name, theirs) == registry.find(name).model


def test_the_gate_of_qwen3_6_stays_what_transformers_computes():
    """Its configuration has output_gate_type swish, which transformers does not read, so the model is that of Qwen3.5."""
    assert PRESETS["qwen3.6-27b"]["output_gate_type"] == "swish"
    assert registry.find("qwen3.6-27b").model.config == registry.find("qwen3.5-27b").model.config


def test_presets_and_bundled_models_have_different_names():
    assert not set(PRESETS) & set(BUNDLED)
    assert registry.presets() == (*PRESETS, *BUNDLED)
