"""models/glm_moe_dsa.py: fields are read and checked, and the indexer's pairs change what it chooses; equality with transformers is in
test_decoder.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import oracle

from npucompile.graphs.errors import ConfigError
from npucompile.models import deepseek_v32, glm_moe_dsa

VALUES = oracle.CASES["pairs"]


def test_a_missing_field_means_pairs():
    config = glm_moe_dsa.read_config(VALUES)
    assert "indexer_rope_interleave" not in VALUES
    assert glm_moe_dsa.read_config({**VALUES, "indexer_rope_interleave": True}) == config
    halves = glm_moe_dsa.read_config({**VALUES, "indexer_rope_interleave": False})
    assert halves == replace(config, indexer_rope_interleave=False) != config
    assert vars(halves) == vars(deepseek_v32.read_config({**VALUES, "model_type": "deepseek_v32"}))


@pytest.mark.parametrize(("tokens", "same"), [(9, True), (30, False)], ids=["as many as it chooses", "more than it chooses"])
@torch.no_grad()
def test_halves_in_place_of_pairs_show_beyond_the_chosen_keys_alone(tokens, same):
    random = oracle.case("pairs")
    ids, theirs = random.prompt(tokens), random.theirs.state_dict()
    wrong = replace(random.model, config=replace(random.model.config, indexer_rope_interleave=False))
    weights = oracle.join(wrong.family.abstract_params(wrong.config, torch.float32), theirs)
    logits = oracle.Runner(wrong, weights).prefill(ids, [3, 1, 2, 5], 0, [tokens])
    assert ((logits - random.logits(ids)[-1]).abs().max() < 1e-4) == same


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts": 10, "layer_types": ["deepseek_sparse_attention"] * 3, "head_dim": 192, "ep_size": 1, "pretraining_tp": 1},
        {"moe_router_dtype": "float32", "index_topk_pattern": None, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ],
)
def test_fields_of_published_files_are_read(fields):
    assert glm_moe_dsa.read_config({**VALUES, **fields}) == glm_moe_dsa.read_config(VALUES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"index_topk": None}, "index_topk is missing"),
        ({"indexer_rope_interleave": 1}, "indexer_rope_interleave is 1; expected bool"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype is 'bfloat16'; supported is 'float32'"),
        ({"num_experts": 11}, "n_routed_experts is 10 and num_experts is 11"),
        ({"q_lora_rank": None}, "q_lora_rank: the indexer reads compressed queries"),
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"index_kpool": 4}, "index_kpool is 4, and nothing here reads it"),
    ],
)
def test_a_malformed_configuration_is_refused_by_field(change, named):
    with pytest.raises(ConfigError) as error:
        glm_moe_dsa.read_config({**VALUES, **change})
    assert named in str(error.value)
