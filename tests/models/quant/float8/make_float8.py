"""Makes the checkpoint of this directory with compressed-tensors; not run by tests. In the environment of
../packed: `python make_float8.py`.

A random Llama of two layers in `float-quantized` as the scheme FP8 of llm-compressor writes it, one scale a matrix and one for its
activations; and what the library makes of its values, `decompressed.safetensors`, which is no part of the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

HERE, LARGEST = Path(__file__).parent, 448
SIZES = {"vocab_size": 272, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def main() -> None:
    """Writes the files."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, intermediate_size=128, tie_word_embeddings=False, max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    one = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    weights, activations = QuantizationArgs(**one), QuantizationArgs(**one)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    tensors, plain = {}, {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if not isinstance(model.get_submodule(module), torch.nn.Linear) or module == "lm_head":
            tensors[name] = tensor.contiguous()
            continue
        scales = {"weight_scale": (tensor.float().abs().amax() / LARGEST).to(tensor.dtype).view(1)}
        scales["input_scale"] = torch.full((1,), 0.02).bfloat16()
        stored = FloatQuantizationCompressor.compress({"weight": tensor, **scales}, scheme)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in stored.items()}
        plain[name] = FloatQuantizationCompressor.decompress(stored, scheme)["weight"].contiguous()
    save_file(tensors, HERE / "model.safetensors")
    save_file(plain, HERE / "decompressed.safetensors")
    described = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None}
    group = {"targets": ["Linear"], "output_activations": None, "weights": json.loads(weights.model_dump_json())}
    group["input_activations"] = json.loads(activations.model_dump_json())
    values = {**config.to_dict(), "quantization_config": {**described, "config_groups": {"group_0": group}}}
    (HERE / "config.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
