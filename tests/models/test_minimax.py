"""models/minimax.py: a published file means what transformers computes, and what is not computed is refused."""

from __future__ import annotations

import pytest
from transformers import MiniMaxM2Config

from npucompile.graphs.errors import ConfigError
from npucompile.models import minimax
from npucompile.models.presets import PRESETS

FILE = {**PRESETS["minimax-m2"], "attn_type_list": [1] * 62}


def test_a_published_file_rotates_what_transformers_does():
    theirs, ours = MiniMaxM2Config(**{key: value for key, value in FILE.items() if key != "model_type"}), minimax.read_config(FILE)
    assert ours.rotary.dim == theirs.rope_parameters["partial_rotary_factor"] * theirs.head_dim == 64
    assert ours.rotary.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'; supported is 'per_layer'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"shared_intermediate_size": 1536}, "shared_intermediate_size is 1536; supported is 0"),
        ({"attn_type_list": [1, 0] * 31}, "attn_type_list is [1, 0"),
        ({"attn_window_size": 128}, "attn_window_size is 128, and nothing here reads it"),
        ({"rotary_dim": 63}, "head_dim * partial_rotary_factor is 63"),
    ],
)
def test_what_is_not_computed_is_refused_by_field(change, named):
    with pytest.raises(ConfigError) as error:
        minimax.read_config({**FILE, **change})
    assert named in str(error.value)
