"""models/quant/quantization_config.py: int8 of compressed-tensors becomes formats, FP8 blocks are floats, all else is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import modelslim

from npucompile.graphs.errors import CheckpointError
from npucompile.models import checkpoint, registry
from npucompile.models.quant.declare import stored
from npucompile.models.quant.description import formats_in
from npucompile.models.variant import Variant

SOURCE = "dense_w8a8_dynamic"
INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.down.*"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
            "output_activations": None,
        }
    },
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
IGNORED = "model.layers.1.mlp.down_proj"


def written(directory: Path, config: dict[str, Any]) -> Path:
    """The matrices of a ModelSlim checkpoint in the layout of compressed-tensors: no offsets, and bfloat16 scales."""
    values = json.loads((modelslim.FIXTURES / SOURCE / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    tensors = {name: tensor for name, tensor in modelslim.tensors(SOURCE).items() if not name.endswith("weight_offset")}
    tensors = {name: tensor.bfloat16() if name.endswith("scale") else tensor for name, tensor in tensors.items()}
    tensors[f"{IGNORED}.weight"] = tensors[f"{IGNORED}.weight"] * tensors.pop(f"{IGNORED}.weight_scale")
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_int8_with_a_scale_a_token_is_read(tmp_path: Path) -> None:
    directory = written(tmp_path, INT8)
    formats = formats_in(directory)
    assert formats is not None
    model = registry.find(directory).model
    names = [f"model.layers.{i}.{part}" for i in range(4) for part in ("self_attn.q_proj", "mlp.down_proj")]
    assert [formats.of([name]) for name in names] == ["float" if name == IGNORED else "w8a8_dynamic" for name in names]
    assert [formats.of([name]) for name in ("lm_head.weight", "model.embed_tokens.weight")] == ["float", "float"]
    params = model.family.abstract_params(model.config, torch.float32)
    loaded = checkpoint.load(checkpoint.open_checkpoint(directory), stored(params, Variant(formats=formats)))
    down, tensors = loaded["layers"][0]["mlp"]["down"], modelslim.tensors(SOURCE)
    assert torch.equal(down["weight"], tensors["model.layers.0.mlp.down_proj.weight"].t())
    assert torch.equal(down["scale"][0], tensors["model.layers.0.mlp.down_proj.weight_scale"].bfloat16().float().squeeze(1))


def test_fp8_with_block_scales_is_a_checkpoint_of_floats(tmp_path: Path) -> None:
    assert formats_in(written(tmp_path, FP8)) is None
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": FP8}}))
    assert formats_in(tmp_path) is None


def changed(**changes: Any) -> dict[str, Any]:
    """INT8 with other values at paths, whose parts are joined by two underscores."""
    config = copy.deepcopy(INT8)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization_config: quant_method is 'awq'; legal are compressed-tensors, fp8"),
        ({"bits": 4}, "quant_method is None; legal are"),
        ({**FP8, "weight_block_size": None}, r"weight_block_size is None; legal is \[128, 128\]"),
        (changed(format="pack-quantized"), "group_0: format is 'pack-quantized'; legal is int-quantized"),
        (changed(config_groups__group_0__weights__num_bits=4), "group_0: weights: num_bits is 4; legal is 8"),
        (changed(config_groups__group_0__weights__strategy="group"), "weights: strategy is 'group'; legal is 'channel'"),
        (changed(config_groups__group_0__weights__symmetric=False), "weights: symmetric is False; legal is True"),
        (changed(config_groups__group_0__input_activations__dynamic=False), "input_activations: dynamic is False; legal is True"),
        (changed(config_groups__group_0__input_activations=None), "input_activations: num_bits is None; legal is 8"),
        (changed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is .*: a quantised cache is not read here; legal is null"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        formats_in(written(tmp_path, config))
