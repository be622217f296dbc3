"""models/qwen3.py: configurations are read in the forms of both versions of transformers, and malformed ones refused."""

from __future__ import annotations

import pytest
from support import oracle

from npucompile.graphs.errors import ConfigError
from npucompile.models import qwen3


def test_older_files_read_the_same():
    values = oracle.CASES["plain-moe"]
    older = {key: value for key, value in values.items() if key != "rope_parameters"} | {"rope_theta": 10_000, "rope_scaling": None}
    older["num_local_experts"] = older.pop("num_experts")
    assert qwen3.read_config(older) == qwen3.read_config(values)


@pytest.mark.parametrize("name", ["plain-moe", "plain-moe-some-dense"])
def test_layers_without_experts_are_those_of_transformers(name):
    random = oracle.case(name)
    theirs = [qwen3.MOE if hasattr(layer.mlp, "experts") else qwen3.DENSE for layer in random.theirs.model.layers]
    assert list(random.model.config.layer_kinds) == theirs


@pytest.mark.parametrize(
    "name, change, named",
    [
        ("plain", {"head_dim": None}, "head_dim is missing"),
        ("plain", {"head_dim": 15}, "head_dim * partial_rotary_factor is 15"),
        ("plain", {"num_key_value_heads": 2}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ("plain", {"intermediate_size": None}, "intermediate_size is missing"),
        ("plain", {"use_sliding_window": True}, "use_sliding_window is True; supported is False"),
        ("plain", {"attention_bias": True}, "attention_bias is True; supported is False"),
        ("plain-moe", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
        ("plain-moe", {"num_experts_per_tok": 6}, "num_experts_per_tok must not exceed num_experts"),
        ("plain-moe", {"mlp_only_layers": [True]}, "mlp_only_layers is [True]; expected a list of layers"),
        ("plain-moe", {"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_a_malformed_configuration_is_refused_by_field(name, change, named):
    with pytest.raises(ConfigError) as error:
        qwen3.read_config({**oracle.CASES[name], **change})
    assert named in str(error.value)
