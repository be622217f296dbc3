"""models/quant/quantization_config.py: int8 of compressed-tensors becomes formats, FP8 blocks are floats, all else is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import modelslim
from transformers import AutoConfig, AutoModelForCausalLM

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError, SpecError
from npucompile.graphs.quantise import unpack_w4
from npucompile.models import checkpoint, registry
from npucompile.models.quant.declare import stored
from npucompile.models.quant.description import formats_in
from npucompile.models.quant.formats import Formats
from npucompile.models.variant import Variant
from npucompile.tools.quantize.forward import loaded, logits

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
        (changed(format="float-quantized"), "group_0: format is 'float-quantized'; legal is int-quantized, pack-quantized"),
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


PACKED = Path(__file__).parent / "packed"


def dequantised(leaf: Any) -> torch.Tensor:
    """The matrix [out..., K] that an int4 weight stands for."""
    scale = leaf["group_scale"]
    return (unpack_w4(leaf["weight"]).unflatten(0, (len(scale), -1)) * scale[:, None]).flatten(0, 1).movedim(0, -1)


def test_packed_int4_is_what_the_library_makes_of_it() -> None:
    """`packed/` is a checkpoint that compressed-tensors wrote, with the matrices that it unpacks."""
    formats = formats_in(PACKED)
    assert formats is not None
    assert (formats.group, formats.stored) == (32, True)
    assert [formats.of([f"model.layers.{i}.mlp.down_proj.weight"]) for i in range(2)] == ["w4a16", "float"]
    theirs = load_file(PACKED / "decompressed.safetensors")
    plain = registry.find(PACKED).model
    own = replace(plain, config=replace(plain.config, variant=Variant(formats=formats)))
    opened, compared = checkpoint.load(checkpoint.open_checkpoint(PACKED), own.params(torch.bfloat16)), 0
    for path, param in tree.flatten(plain.params(torch.bfloat16)):
        if not all(name in theirs for name in param.source.names):
            continue
        leaf: Any = opened
        for key in path.split("."):
            leaf = leaf[int(key)] if isinstance(leaf, list) else leaf[key]
        want = param.source.join(*(theirs[name] for name in param.source.names))
        assert torch.equal(dequantised(leaf).bfloat16().view(want.shape), want), path
        compared += 1
    assert compared == 7


@torch.no_grad()
def test_logits_of_packed_int4_are_those_of_its_floats() -> None:
    values = json.loads((PACKED / "config.json").read_text())
    values.pop("quantization_config")
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).eval().float()
    stored = {name: tensor.float() for name, tensor in load_file(PACKED / "model.safetensors").items() if name.endswith(".weight")}
    stored |= {name: tensor.float() for name, tensor in load_file(PACKED / "decompressed.safetensors").items()}
    reference.load_state_dict(stored)
    tokens = torch.randint(0, 272, (1, 40), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    want = reference(tokens.long()).logits[0]
    model, params = loaded(registry.find(PACKED), torch.float32)
    got = logits(model, params, tokens, torch.float32)[0]
    # The library's floats are rounded to bfloat16, ours are not.
    assert (got - want).square().mean().sqrt() < 0.01 * want.square().mean().sqrt()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symmetric": False}, "symmetric is False; legal is True"),
        ({"num_bits": 8}, "num_bits is 8; legal is 4"),
        ({"actorder": "group"}, "actorder is 'group': groups of columns in another order are not read"),
        ({"strategy": "block"}, "strategy is 'block' with group_size 32; legal is 'channel', or 'group' with a size"),
    ],
)
def test_other_packed_integers_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values = json.loads((PACKED / "config.json").read_text())
    values["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
    (tmp_path / "config.json").write_text(json.dumps(values))
    shutil.copyfile(PACKED / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        formats_in(tmp_path)


def test_packed_experts_are_refused() -> None:
    experts = replace(
        registry.find("qwen3-30b-a3b").model.config, variant=Variant(formats=Formats((("*.experts.*", "w4a16"),)), grouped=True)
    )
    with pytest.raises(
        SpecError, match=r"experts\.gate_up_proj: the format is w4a16; legal for experts are float, w8a8_dynamic, w4a8_dynamic"
    ):
        stored(registry.find("qwen3-30b-a3b").model.family.abstract_params(experts, torch.bfloat16), experts.variant)
