"""models/qwen3_next.py: published files are read as they are, and checkpoints hold DeltaNet's projections by key head."""

from __future__ import annotations

import torch
from support import oracle

from npucompile.models import hybrid, qwen3_next

# Names of fields as in the published config.json: no rope_parameters, and none of the draft head.
PUBLISHED = {
    **{key: value for key, value in oracle.CASES["next"].items() if key not in ("rope_parameters", "layer_types")},
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "rope_scaling": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_a_published_file_has_one_layer_that_drafts():
    config = qwen3_next.read_config(PUBLISHED)
    assert (config.mtp_num_hidden_layers, config.rotary.dim, config.rotary.theta, config.dense_layers) == (1, 4, 1e7, ())
    assert config.layer_types == (hybrid.LINEAR,) * 3 + (hybrid.FULL,)
    names = {
        name for param in hybrid.abstract_params(config, torch.float32)["mtp"]["layer"]["mixer"].values() for name in param.source.names
    }
    assert "mtp.layers.0.self_attn.k_proj.weight" in names


def test_layers_without_experts_are_those_of_transformers():
    for name in ("next", "next-some-dense"):
        random = oracle.case(name)
        theirs = [i for i, layer in enumerate(random.theirs.model.layers) if not hasattr(layer.mlp, "experts")]
        assert list(random.model.config.dense_layers) == theirs
