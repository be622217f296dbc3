"""models/draft_model.py: a model with a head of a second checkpoint is a model as any other, in any variant and size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import eagle, oracle

from npucompile.graphs import tree
from npucompile.graphs.errors import ConfigError
from npucompile.graphs.types import Mesh
from npucompile.models import draft_source, registry, sharding_rules
from npucompile.models.draft_model import DRAFT
from npucompile.models.family import ModelConfig
from npucompile.models.presets import DRAFT_PRESETS
from npucompile.models.variant import Variant


def test_the_variant_reaches_both_and_copies_heads_of_each():
    config = replace(eagle.head("moe").random.model.config, variant=Variant(kv_repeat=2, grouped=True))
    assert (config.target.variant.kv_repeat, config.draft.variant.kv_repeat) == (2, 1)
    config = replace(config, variant=Variant(draft_kv_repeat=2))
    assert (config.target.variant.kv_repeat, config.draft.variant.kv_repeat) == (1, 2)
    with pytest.raises(ConfigError, match="num_attention_heads must be a multiple of 8 key-value heads, copies included"):
        replace(config, variant=Variant(draft_kv_repeat=4))


def test_all_that_builds_read_of_a_configuration_is_there():
    config = eagle.head("moe").random.model.config
    for name in (name for name in vars(ModelConfig) if not name.startswith("_")):
        assert getattr(config, name) is not None, name
    assert config.moe_intermediate_size == config.target.moe_intermediate_size
    assert config.split_heads == {**config.target.split_heads, "draft num_attention_heads": 4}
    with pytest.raises(AttributeError):
        config.no_such_field  # noqa: B018


def test_a_head_of_the_models_own_gives_way():
    with_head = oracle.drafting("next")
    model = draft_source.attached(with_head.model, eagle.settings(with_head, eagle_config=None), ("d2t",))
    keys = {"embed", "layers", "norm", "head"}
    assert set(with_head.model.family.abstract_params(with_head.model.config, torch.float32)) == {*keys, "mtp"}
    assert set(model.family.abstract_params(model.config, torch.float32)) == {*keys, DRAFT}


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=8"])
@pytest.mark.parametrize("name", ["qwen3-32b", "qwen3-235b-a22b"])
def test_the_small_model_divides_by_the_same_mesh(name, mesh):
    assert f"{name}-eagle3" in DRAFT_PRESETS
    where = Mesh.parse(mesh)
    large = draft_source.with_draft_model(registry.find(name), f"{name}-eagle3").model
    heads = {"kv_repeat": large.config.num_key_value_heads, "draft_kv_repeat": large.config.draft.num_key_value_heads}
    variant = Variant(**{field: max(1, where.axis("tp") // count) for field, count in heads.items()})
    config = large.family.shrink(replace(large.config, variant=variant), where.axis("tp"), where.size)
    small = replace(large, config=config, drafting=True)
    rules = sharding_rules.rules(where, experts=config.num_experts, tokens=where.axis("tp"))
    for path, param in tree.flatten(small.params(torch.float32)):
        rules.check(param.aval, where, path)
    assert config.draft.draft_vocab_size < config.vocab_size
    assert len(set(config.draft.taps)) == 3
