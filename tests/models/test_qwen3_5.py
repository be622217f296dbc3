"""models/qwen3_5.py: configurations of every published form are read, and malformed ones refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support import oracle

from npucompile.graphs.errors import ConfigError
from npucompile.models import qwen3_5


def test_layer_types_follow_the_interval_when_they_are_absent():
    values = {**oracle.CASES["moe"], "num_hidden_layers": 7, "layer_types": None, "full_attention_interval": 3}
    kinds = qwen3_5.read_config(values).layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [2, 5]


def test_wrapped_and_older_configurations_read_the_same():
    values = oracle.CASES["dense"]
    plain = qwen3_5.read_config(values)
    assert qwen3_5.read_config({"text_config": values, "vision_config": {"depth": 3}}) == plain
    older = {key: value for key, value in values.items() if key != "rope_parameters"}
    older.update(rope_theta=10000, partial_rotary_factor=0.25, rope_scaling={"type": "mrope"})
    assert qwen3_5.read_config(older) == plain
    older["rope_scaling"]["mrope_section"] = [1, 1, 0]
    assert qwen3_5.read_config(older) == replace(plain, rotary=replace(plain.rotary, sections=(1, 1, 0)))


@pytest.mark.parametrize(
    "change, named",
    [
        ({"head_dim": None}, "head_dim is missing"),
        ({"head_dim": "16"}, "head_dim is '16'; expected int"),
        ({"hidden_size": 0}, "hidden_size is 0; expected at least 1"),
        ({"hidden_size": True}, "hidden_size is True; expected int"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'; expected float"),
        ({"num_key_value_heads": 2}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads"),
        ({"layer_types": ["full_attention"]}, "expected 4 of 'full_attention' and 'linear_attention'"),
        ({"layer_types": [{}, {}, {}, {}]}, "layer_types is"),
        ({"layer_types": ["mamba"] * 4}, "layer_types is"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000; expected at most 1024"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"attn_output_gate": False}, "attn_output_gate is False; supported is True"),
        ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; supported is 'swish' or 'silu'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True; supported is False"),
        ({"mtp_num_hidden_layers": 2}, "multi-token-prediction layers must be 0 or 1"),
        ({"rope_parameters": []}, "rope_parameters is []; expected an object"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters: rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "head_dim * partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": math.inf}}, "partial_rotary_factor is inf"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling: type is 'dynamic'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, "mrope_section is [1, 1]; expected 3 numbers"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}, "must not exceed"),
    ],
)
def test_a_malformed_configuration_is_refused_by_field(change, named):
    with pytest.raises(ConfigError) as error:
        qwen3_5.read_config({**oracle.CASES["dense"], **change})
    assert named in str(error.value)
