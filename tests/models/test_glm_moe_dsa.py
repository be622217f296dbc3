"""models/glm_moe_dsa.py: fields are read and checked, the indexer's pairs change what it chooses, and shared layers have nothing of it.

Equality with transformers is in test_decoder.py and test_step.py, and of drafts in test_deepseek_v3.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import oracle

from npucompile.models import deepseek_v32, glm_moe_dsa, registry

VALUES = oracle.CASES["pairs"]
SHARED = "moe_shared"


def test_a_missing_field_means_pairs():
    config = glm_moe_dsa.read_config(VALUES)
    assert "indexer_rope_interleave" not in VALUES
    assert glm_moe_dsa.read_config({**VALUES, "indexer_rope_interleave": True}) == config
    halves = glm_moe_dsa.read_config({**VALUES, "indexer_rope_interleave": False})
    assert halves == replace(config, indexer_rope_interleave=False) != config
    plain = deepseek_v32.read_config({**VALUES, "model_type": "deepseek_v32"})
    assert vars(halves) == {**vars(plain), "index_share_for_mtp_iteration": False}


@pytest.mark.parametrize(("tokens", "same"), [(9, True), (30, False)], ids=["as many as it chooses", "more than it chooses"])
@torch.no_grad()
def test_halves_in_place_of_pairs_show_beyond_the_chosen_keys_alone(tokens, same):
    random = oracle.case("pairs")
    ids, theirs = random.prompt(tokens), random.theirs.state_dict()
    wrong = replace(random.model, config=replace(random.model.config, indexer_rope_interleave=False))
    weights = oracle.join(wrong.family.abstract_params(wrong.config, torch.float32), theirs)
    logits = oracle.Runner(wrong, weights).prefill(ids, [3, 1, 2, 5], 0, [tokens])
    assert ((logits - random.logits(ids)[-1]).abs().max() < 1e-4) == same


def test_layers_of_the_published_model_share_indexers():
    config = registry.find("glm-5.2").model.config
    full = [i for i, kind in enumerate(config.layer_kinds) if not kind.endswith("shared")]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert (config.num_indexers, config.num_moe_layers, config.index_share_for_mtp_iteration) == (21, 75, True)
    assert set(config.layer_kinds) == {"dense", "moe", SHARED}
    small = glm_moe_dsa.FAMILY.shrink(config, 4, 16)
    assert small.layer_kinds == ("dense", SHARED, "moe", SHARED)
    other = registry.find("glm-5").model.config
    assert (other.num_indexers, other.layer_kinds) == (78, ("dense",) * 3 + ("moe",) * 75)


def test_a_shared_layer_has_nothing_of_an_indexer():
    random = oracle.drafting("shared-index")
    params = random.model.family.abstract_params(random.model.config, torch.float32)
    pools = random.model.family.abstract_state(random.model.config, oracle.LIMITS, torch.float32)
    indexers = [any(name.startswith("index") for name in layer["mixer"]) for layer in params["layers"]]
    assert indexers == ["index" in pool for pool in pools["layers"]] == [True, True, False, False, True, False, False]
    assert "index_q" in params["mtp"]["layer"]["mixer"]
    assert "index" in pools["mtp"]


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_pattern": "FSF"},
        {"index_topk_pattern": ["full", "shared", "full"]},
        {"indexer_types": ["full", "shared", "full"], "index_topk_freq": 4},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ],
    ids=["letters", "a pattern", "a list", "a number"],
)
def test_which_layers_share_is_said_in_four_ways(fields):
    assert glm_moe_dsa.read_config({**VALUES, **fields}).layer_kinds == ("dense", SHARED, "moe")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts": 10, "layer_types": ["deepseek_sparse_attention"] * 3, "head_dim": 192, "ep_size": 1, "pretraining_tp": 1},
        {"moe_router_dtype": "float32", "index_topk_pattern": None, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ],
)
def test_fields_of_published_files_are_read(fields):
    assert glm_moe_dsa.read_config({**VALUES, **fields}) == glm_moe_dsa.read_config(VALUES)
