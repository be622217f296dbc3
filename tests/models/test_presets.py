"""models/presets.py: the sizes of the presets give the parameters of transformers' models, and the published counts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from npucompile.graphs import tree
from npucompile.models import registry
from npucompile.models.presets import BUNDLED, PARAMETERS, PRESETS, SOURCES, TOWERS
from npucompile.models.quant.declare import stored
from npucompile.models.quant.description import canonical

# Published counts: text parameters without the draft head, and the draft head's own.
COUNTS = {
    "qwen3-32b": (32_762_123_264, 0),
    "qwen3-30b-a3b": (30_532_122_624, 0),
    "qwen3-235b-a22b": (235_093_634_560, 0),
    "qwen3-235b-a22b-2507": (235_093_634_560, 0),
    "qwen3-coder-480b-a35b": (480_154_875_392, 0),
    "qwen3-next-80b-a3b": (79_674_391_296, 1_650_471_424),
    "deepseek-r1": (671_026_419_200, 11_610_068_224),
    "deepseek-v3": (671_026_419_200, 11_610_068_224),
    "deepseek-v3.2": (671_877_944_064, 11_624_027_648),
    "glm-5": (743_911_218_432, 9_952_920_576),
    "glm-5.2": (743_377_019_904, 9_952_920_576),
    "glm-4.7": (352_797_829_024, 3_988_069_792),
    "glm-4.5-air": (106_852_251_264, 2_375_059_584),
    "glm-4.7-flash": (29_943_393_920, 643_706_176),
    "kimi-k2": (1_026_408_232_448, 0),
    "kimi-k2-thinking": (1_026_408_232_448, 0),
    "kimi-k2.5": (1_026_408_232_448, 0),
    "qwen3.5-397b": (396_346_350_336, 6_595_568_128),
    "qwen3.5-27b": (26_895_998_464, 424_699_392),
    "qwen3.6-27b": (26_895_998_464, 424_699_392),
    "llama-3.1-8b": (8_030_261_248, 0),
    "llama-3.1-70b": (70_553_706_496, 0),
    "llama-3.2-1b": (1_235_814_400, 0),
    "llama-3.2-3b": (3_212_749_824, 0),
    "qwen2.5-7b": (7_615_616_512, 0),
    "qwen2.5-72b": (72_706_203_648, 0),
    "mistral-7b-v0.3": (7_248_023_552, 0),
    "minimax-m2": (228_703_644_928 - 13_880_064, 0),  # without the scales of FP8 blocks
    "mixtral-8x7b": (46_702_792_704, 0),
}


def count(params) -> int:
    return sum(math.prod(param.aval.shape) for _, param in tree.flatten(params))


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name):
    model = registry.find(name).model
    params = dict(stored(model.family.abstract_params(model.config, torch.bfloat16), model.config.variant))
    draft = params.pop(model.family.draft_key, {})
    assert (count(params), count(draft)) == COUNTS[name]
    assert count(model.params(torch.bfloat16)) == COUNTS[name][0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_that_are_listed_are_those_of_the_model(name):
    assert count(registry.find(name).model.params(torch.bfloat16)) == PARAMETERS[name]


def text(name) -> dict[str, Any]:
    """Fields for the class of the text model, which those of multimodal models have beside the class of the whole."""
    values = {key: value for key, value in PRESETS[name].items() if key != "architectures"}
    wrapped = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "kimi_k2": "deepseek_v3"}
    return {**values, "model_type": wrapped.get(values["model_type"], values["model_type"])}


@pytest.mark.parametrize("name", PRESETS)
def test_tensors_are_those_of_transformers(name):
    """Of a model of four layers, by name and shape; and the same fields through their class give the same configuration."""
    theirs = AutoConfig.for_model(**text(name))
    assert registry.from_config(name, theirs.to_dict() | mtp(name)).config == registry.find(name).model.config
    few = {**text(name), "num_hidden_layers": min(4, theirs.num_hidden_layers)}
    with torch.device("meta"):
        want = {
            canonical(key): tuple(t.shape) for key, t in AutoModelForCausalLM.from_config(AutoConfig.for_model(**few)).state_dict().items()
        }
    model = registry.from_config(name, few)
    if model.config.tie_word_embeddings:
        del want["lm_head.weight"]
    leaves = [param.source for _, param in tree.flatten(model.params(torch.bfloat16))]
    assert {key: shape for source in leaves for key, shape in zip(source.names, source.shapes, strict=True)} == want


def mtp(name) -> dict[str, Any]:
    """The fields of a draft head, which classes of transformers leave out."""
    return {key: value for key, value in PRESETS[name].items() if key.startswith("mtp_")}


def test_every_preset_says_where_it_was_read():
    assert SOURCES.keys() == PRESETS.keys()
    assert all(len(source) > 20 for source in SOURCES.values())


def test_the_gate_of_qwen3_6_stays_what_transformers_computes():
    """Its configuration has output_gate_type swish, which transformers does not read, so the model is that of Qwen3.5."""
    assert PRESETS["qwen3.6-27b"]["output_gate_type"] == "swish"
    assert registry.find("qwen3.6-27b").model.config == registry.find("qwen3.5-27b").model.config


def test_presets_and_bundled_models_have_different_names():
    assert not set(PRESETS) & set(BUNDLED)
    assert registry.presets() == (*PRESETS, *BUNDLED) == tuple(PARAMETERS)


TOWER_MILLIONS = {
    "qwen3.5-2b": 331.4, "qwen3.5-4b": 333.5, "qwen3.5-9b": 456.0, "qwen3.5-397b": 456.0, "qwen3.5-27b": 460.7, "qwen3.6-27b": 460.7,
    "qwen3.5-122b-a10b": 451.3, "qwen3.5-35b-a3b": 446.6, "qwen3.6-35b-a3b": 446.6,
}  # fmt: skip


@pytest.mark.parametrize("name", TOWERS)
def test_towers_have_the_published_number_of_parameters_and_leave_the_text_alone(name):
    source = registry.find(name)
    tower = source.model.family.tower
    assert round(count(stored(tower.abstract_params(source.tower, torch.bfloat16), source.tower.variant)) / 1e6, 1) == TOWER_MILLIONS[name]
    described = source.described()
    assert (json.loads(source.text), described.tower) == (PRESETS[name], source.tower)
    assert registry.from_config(name, json.loads(described.text)) == source.model
    assert described.described() == described
    config = AutoConfig.for_model(**json.loads(described.text))
    assert config.vision_config.out_hidden_size == config.text_config.hidden_size == source.tower.out_hidden_size


def test_every_model_with_a_tower_that_is_known_has_it():
    assert set(TOWERS) == set(TOWER_MILLIONS)
    assert registry.find("qwen3.5-0.8b").tower is None
    assert registry.find("qwen3-32b").tower is None
