"""models/rotary.py: angles equal transformers' for every kind of scaling and both forms of configuration; others are refused."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.qwen3 import modeling_qwen3

from npucompile.graphs.errors import ConfigError
from npucompile.models.config import Fields
from npucompile.models.rotary import Rotary, read_rotary

POSITIONS = torch.tensor([0, 1, 2, 77, 500, 8191, 131_071], dtype=torch.int32)
DEEPSEEK = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK["original_max_position_embeddings"] = 4096

# Fields of a configuration, in both forms, of heads of 64 channels.
CASES = {
    "older": {"rope_theta": 1e6},
    "newer": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "yarn, newer": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16}
    },
    "not truncated": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    },
    "given magnitude": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 0.75},
    },
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
    },
    "two magnitudes": {"rope_theta": 1e4, "rope_scaling": {**DEEPSEEK, "mscale": 0.7}},
    "deepseek": {"rope_theta": 10000, "rope_scaling": DEEPSEEK},
}


def read(values):
    return read_rotary(Fields({"max_position_embeddings": 40_960, **values}, "config.json"), 64)


@pytest.mark.parametrize("name", CASES)
def test_angles_equal_transformers(name):
    """At far positions angles are as exact as f32 holds them: a relative 1e-7 of 131,071 turns."""
    config = Qwen3Config(
        head_dim=64, max_position_embeddings=40_960, **{k: v.copy() if isinstance(v, dict) else v for k, v in CASES[name].items()}
    )
    module = modeling_qwen3.Qwen3RotaryEmbedding(config)
    want = [x[0, :, :32] for x in module(torch.zeros(1), POSITIONS[None])]
    rotary = read(CASES[name])
    for ours, theirs in zip(rotary.angles(POSITIONS), want, strict=True):
        torch.testing.assert_close(ours[:3], theirs[:3], rtol=1e-6, atol=1e-6)
        assert (ours[:5] - theirs[:5]).abs().max() < 1e-4
        assert (ours - theirs).abs().max() < 0.03


def test_scale_of_scores_is_that_of_deepseek():
    """Cosines keep their magnitude, 1, and scores are multiplied by (0.1 ln 40 + 1)^2."""
    scaling = read(CASES["deepseek"]).scaling
    assert (scaling.magnitude, scaling.low, scaling.high) == (1.0, 10, 23)
    config = DeepseekV3Config(rope_theta=10000, rope_scaling=dict(DEEPSEEK), max_position_embeddings=163_840)
    want = modeling_deepseek_v3.yarn_apply_mscale(config.rope_parameters, 1.0)
    assert math.isclose(scaling.softmax, want)
    assert math.isclose(want, 1.873854, rel_tol=1e-6)


@pytest.mark.parametrize("magnitudes", [{}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
def test_attn_factor_multiplies_the_magnitude_that_transformers_infers(magnitudes):
    """As vLLM reads it; transformers 5.23 passes it over, and takes the product as `attention_factor`. A published file has 1 / 1.1386."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **magnitudes}
    inferred = read({"rope_theta": 1e6, "rope_scaling": yarn}).scaling.magnitude
    factor = {"attn_factor": 0.8782488562869419}
    ours = read({"rope_theta": 1e6, "rope_scaling": {**yarn, **factor, "extrapolation_factor": 1, "apply_yarn_scaling": True}})
    assert ours.scaling.magnitude == pytest.approx(0.8782488562869419 * inferred)
    assert magnitudes or ours.scaling.magnitude == pytest.approx(1.0)
    whole = {"rope_theta": 1e6, "rope_scaling": {**yarn, "attention_factor": ours.scaling.magnitude}}
    assert read(whole) == ours
    module = modeling_qwen3.Qwen3RotaryEmbedding(Qwen3Config(head_dim=64, max_position_embeddings=40_960, **whole))
    assert ours.scaling.magnitude == pytest.approx(module.attention_scaling)


@pytest.mark.parametrize(
    "field", [{"extrapolation_factor": 0.5}, {"apply_yarn_scaling": False}, {"attention_factor": 1.0, "attn_factor": 0.5}]
)
def test_what_makes_another_scaling_is_refused_by_name(field):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    with pytest.raises(ConfigError, match=f"{list(field)[-1]} is"):
        read({"rope_theta": 1e6, "rope_scaling": {**yarn, **field}})


def test_only_some_channels_turn():
    fields = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert read(fields) == read({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}) == Rotary(32, 1e4)
    assert read_rotary(Fields({"rope_theta": 1e4}, "config.json"), 64, partial=0.25) == Rotary(16, 1e4)


def test_scaling_lengthens_the_context_it_is_for():
    """People add `rope_scaling` and leave max_position_embeddings as it was."""
    assert read(CASES["yarn"]).longest(40_960) == 131_072
    assert read(CASES["deepseek"]).longest(163_840) == 163_840
    assert read(CASES["older"]).longest(40_960) == 40_960


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "rope_theta is missing"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}},
            "rope_scaling: type is 'longrope'; supported is 'default' or 'mrope' or",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "original_max_position_embeddings is missing"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is missing"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; expected at least 1"),
        ({"rope_theta": 1, "rope_scaling": DEEPSEEK}, "rope_theta above 1"),
        ({"rope_theta": 1e4, "rope_scaling": {**DEEPSEEK, "beta_slow": 64}}, "beta_fast is 32.0, beta_slow 64.0"),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.24},
            "head_dim * partial_rotary_factor is 15; expected an even number",
        ),
        ({"rope_theta": 1e4, "partial_rotary_factor": 2}, "head_dim * partial_rotary_factor is 128"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(values, named):
    with pytest.raises(ConfigError) as error:
        read(values)
    assert named in str(error.value)
