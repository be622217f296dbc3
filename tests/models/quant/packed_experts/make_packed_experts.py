"""Makes the checkpoints of this directory with compressed-tensors; not run by tests.

    python3.11 -m venv CT && CT/bin/pip install torch==2.13.0 'transformers==5.23.0' compressed-tensors==0.20.0
    CT/bin/python make_packed_experts.py

A random Qwen3-MoE of two layers, `floats.safetensors`; the same in `pack-quantized`, `group/` in groups of 32 weights and `channel/` with a
scale for each output channel; and what the library makes of the integers of each, `decompressed.safetensors`, which is no part of it.
Scales are the largest weight over 7 as bfloat16 holds it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

HERE, GROUP = Path(__file__).parent, 32
IGNORED = ["lm_head", "re:.*mlp.gate$"]
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 64, "norm_topk_prob": True}


def main() -> None:
    """Writes the files."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False, max_position_embeddings=4096)
    # Saving takes the experts of a layer apart, as published checkpoints have them.
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(HERE / "made")
    floats = load_file(HERE / "made" / "model.safetensors")
    save_file(floats, HERE / "floats.safetensors")
    for strategy, size in (("group", GROUP), ("channel", None)):
        _write(
            HERE / strategy, config, floats, QuantizationArgs(num_bits=4, type="int", strategy=strategy, group_size=size, symmetric=True)
        )
    for file in (HERE / "made").iterdir():
        file.unlink()
    (HERE / "made").rmdir()


def _write(directory: Path, config: Qwen3MoeConfig, floats: dict[str, torch.Tensor], weights: QuantizationArgs) -> None:
    directory.mkdir(exist_ok=True)
    scheme, tensors, plain = QuantizationScheme(targets=["Linear"], weights=weights), {}, {}
    for name, tensor in floats.items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, weights.group_size or tensor.shape[1]))
        scale = (groups.abs().amax(-1) / 7).bfloat16()
        packed = PackedQuantizationCompressor.compress({"weight": tensor.float(), "weight_scale": scale}, scheme)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in packed.items()}
        plain[name] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"].contiguous()
    save_file(tensors, directory / "model.safetensors")
    save_file(plain, directory / "decompressed.safetensors")
    described = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": IGNORED, "kv_cache_scheme": None}
    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json()), "input_activations": None, "output_activations": None}
    values = {**config.to_dict(), "quantization_config": {**described, "config_groups": {"group_0": group}}}
    (directory / "config.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
