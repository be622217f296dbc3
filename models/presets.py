"""The config.json fields of published models by name, so that graphs can be built without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN3_5: dict[str, Any] = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

_QWEN3_5_27B: dict[str, Any] = {
    **_QWEN3_5,
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "intermediate_size": 17_408,
    "linear_num_value_heads": 48,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5-397b": {
        **_QWEN3_5,
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "num_hidden_layers": 60,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "linear_num_value_heads": 64,
    },
    "qwen3.5-27b": _QWEN3_5_27B,
    # transformers does not read this key of the published file: the attention gate stays a sigmoid.
    "qwen3.6-27b": {**_QWEN3_5_27B, "output_gate_type": "swish"},
}
"""Text fields of the published config.json files, by preset name."""

BUNDLED = ("qwen3.5-tiny",)
"""Presets whose checkpoint is part of the package, in `bundled/<name>` beside this file."""
