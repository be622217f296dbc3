"""models/llama.py: what each kind's file leaves out means what transformers takes for it, and what is not computed is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import oracle

from npucompile.graphs import tree
from npucompile.graphs.errors import ConfigError
from npucompile.models import checkpoint, llama

OLD = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""As Llama 2's files are: without a base, a width and a number of key heads."""
MISTRAL = {"model_type": "mistral", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip


def test_a_file_of_llama_2_means_what_transformers_takes_for_it():
    from transformers import LlamaConfig

    theirs, ours = LlamaConfig(**{key: value for key, value in OLD.items() if key != "model_type"}), llama.read_config(OLD)
    assert (ours.head_dim, ours.num_key_value_heads) == (theirs.head_dim, theirs.num_key_value_heads) == (8, 4)
    assert ours.rotary.theta == theirs.rope_parameters["rope_theta"] == 1e4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"mlp_bias": True}, "mlp_bias is True; supported is False"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is True; supported is False"),
        ({**MISTRAL, "sliding_window": 64}, "sliding_window is 64; supported is null, or at least the context of 128"),
        ({**MISTRAL, "max_position_embeddings": 8192}, "sliding_window is 4096, which the file leaves out;"),
        ({"model_type": "mistral"}, "rope_theta is missing"),
        ({"model_type": "mixtral"}, "num_local_experts or num_experts is missing"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0 and high_freq_factor 4.0"),
    ],
)
def test_what_is_not_computed_is_refused_by_field(change, named):
    with pytest.raises(ConfigError) as error:
        llama.read_config({**OLD, **change})
    assert named in str(error.value)


@pytest.mark.parametrize("window", [None, 128, 4096])
def test_a_window_of_the_whole_context_is_none(window):
    config = llama.read_config({**OLD, **MISTRAL, "sliding_window": window})
    assert config.max_position_embeddings == 128


def test_a_checkpoint_of_mixtral_is_read_by_the_names_that_it_is_published_with(tmp_path: Path):
    random = oracle.case("mixtral")
    random.theirs.save_pretrained(tmp_path)
    opened = checkpoint.open_checkpoint(tmp_path)
    assert {name for name in opened.tensors if ".block_sparse_moe.experts.0.w1." in name}
    read = checkpoint.load(opened, random.model.family.abstract_params(random.model.config, torch.float32))
    for (path, ours), (_, theirs) in zip(tree.flatten(read), tree.flatten(random.weights), strict=True):
        assert torch.equal(ours, theirs), path
