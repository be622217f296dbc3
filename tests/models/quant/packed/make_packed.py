"""Makes the checkpoint of this directory with compressed-tensors; not run by tests.

    python3.11 -m venv CT && CT/bin/pip install torch==2.13.0 'transformers==5.23.0' compressed-tensors==0.20.0
    CT/bin/python make_packed.py

A random Qwen3 of two layers in `pack-quantized`: int4 in groups of 32, but the down projection of the second; and what the library
makes of its integers, `decompressed.safetensors`, which is no part of the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

HERE, GROUP = Path(__file__).parent, 32
FLOAT = ("lm_head", "model.layers.1.mlp.down_proj")
SIZES = {"vocab_size": 272, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def main() -> None:
    """Writes the files."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, intermediate_size=128, tie_word_embeddings=False, max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors, plain = {}, {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if not isinstance(model.get_submodule(module), torch.nn.Linear) or module in FLOAT:
            tensors[name] = tensor.contiguous()
            continue
        scale = (tensor.float().unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).to(tensor.dtype)
        packed = PackedQuantizationCompressor.compress({"weight": tensor, "weight_scale": scale}, scheme)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in packed.items()}
        plain[name] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"].contiguous()
    save_file(tensors, HERE / "model.safetensors")
    save_file(plain, HERE / "decompressed.safetensors")
    described = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(FLOAT), "kv_cache_scheme": None}
    group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json()), "input_activations": None, "output_activations": None}
    values = {**config.to_dict(), "quantization_config": {**described, "config_groups": {"group_0": group}}}
    (HERE / "config.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
