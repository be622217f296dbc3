"""models/quant/quantization_config.py: int8 of compressed-tensors becomes formats, FP8 blocks are floats, all else is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import modelslim
from support.fp8 import compressed
from transformers import AutoModelForCausalLM

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError, SpecError
from npucompile.graphs.quantise import unpack_w4
from npucompile.models import checkpoint, registry
from npucompile.models.checkpoint import PER_EXPERT
from npucompile.models.quant.declare import stored
from npucompile.models.quant.description import formats_in
from npucompile.models.quant.formats import Formats
from npucompile.models.step import Model
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
ROUNDED = {"num_bits": 8, "type": "int"}
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
    names = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")]
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
        ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; legal is \[128, 128\] or null"),
        (changed(format="naive-quantized"), "format is 'naive-quantized'; legal is int-quantized, pack-quantized, float-quantized"),
        (changed(format="float-quantized"), "group_0: weights: type is 'int'; legal is 'float'"),
        (compressed("group"), "group_0: weights: strategy is 'group'; legal is 'channel' or 'block' or 'tensor'"),
        (compressed("block", block_structure=[64, 64]), r"block_structure is \[64, 64\]; legal is \[128, 128\] or '128x128' or null"),
        (compressed("channel", dynamic=True), "weights: dynamic is True; legal is False or null"),
        (compressed("channel"), "is stored as w8a8_dynamic, and no group of that format targets it"),
        (changed(config_groups__group_0__weights__num_bits=4), "group_0: weights: num_bits is 4; legal is 8"),
        (changed(config_groups__group_0__weights__strategy="group"), "weights: strategy is 'group'; legal is 'channel'"),
        (changed(config_groups__group_0__weights__symmetric=False), "weights: symmetric is False; legal is True"),
        (changed(config_groups__group_0__input_activations__dynamic=False), "input_activations: dynamic is False; legal is True"),
        (changed(config_groups__group_0__input_activations=None), "input_activations: num_bits is None; legal is 8"),
        (changed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is .*: a quantised cache is not read here; legal is null"),
        (changed(config_groups__group_0__output_activations=ROUNDED), "group_0: output_activations is .*: products are not rounded here"),
        (changed(config_groups__group_0__input_activations__dynamic="local"), "input_activations: dynamic is 'local'; legal is True"),
        (changed(config_groups__group_0__weights__dynamic=True), "weights: dynamic is True; legal is False or null"),
        (changed(config_groups__group_0__weights__block_structure=[128, 128]), "block_structure is .*; legal is null"),
        (changed(transform_config={"config_groups": {"R4": {"type": "hadamard"}}}), "transform_config is .*: rotations of activations are"),
        (changed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format is 'sparse-24-bitmask'; legal is 'dense'"),
        (changed(dequantize=True), "dequantize is True; legal is False or null"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'; legal is 'fp8' or null"),
        ({**FP8, "scale_fmt": "float16"}, "scale_fmt is 'float16'; legal is 'float' or 'ue8m0' or null"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        formats_in(written(tmp_path, config))


PLACES = {
    "quantization_config": "later",
    "a group": "config_groups__group_0__later",
    "weights": "config_groups__group_0__weights__later",
    "input_activations": "config_groups__group_0__input_activations__later",
    "sparsity_config": "sparsity_config__later",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_setting_that_nothing_reads_is_refused_wherever_it_stands(tmp_path: Path, place: str) -> None:
    """One that a later version adds may change what is computed; one without a value says nothing."""
    plain = {"sparsity_config__format": "dense"} if place == "sparsity_config" else {}
    config = changed(sparsity_config={}, transform_config={}, version="0.20.0", quantization_status="compressed")
    assert formats_in(written(tmp_path, config)) is not None
    said = changed(sparsity_config={}, **plain, **{PLACES[place]: 1})
    with pytest.raises(CheckpointError, match="later is 1, a setting that is not known here; known are "):
        formats_in(written(tmp_path, said))
    assert formats_in(written(tmp_path, changed(sparsity_config={}, **plain, **{PLACES[place]: None}))) is not None
    with pytest.raises(CheckpointError, match="quantization_config: later is 1, a setting"):
        formats_in(written(tmp_path, {**FP8, "later": 1}))


def test_what_is_stored_as_floats_is_float_whatever_a_group_targets(tmp_path: Path) -> None:
    """Routers of transformers 5 are no `Linear`, so that `ignore` need not name them; names of tensors do not tell the class."""
    directory = shutil.copytree(EXPERTS / "group", tmp_path / "routers")
    values = json.loads((directory / "config.json").read_text())
    assert any("mlp.gate" in name for name in values["quantization_config"]["ignore"])
    values["quantization_config"]["ignore"] = []
    (directory / "config.json").write_text(json.dumps(values))
    assert formats_in(directory) == formats_in(EXPERTS / "group")
    _, _, params = opened(directory, torch.float32)
    for (path, ours), (_, theirs) in zip(tree.flatten(params), tree.flatten(opened(EXPERTS / "group", torch.float32)[2]), strict=True):
        assert torch.equal(ours, theirs), path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ignore": ["re:.*down_proj"]}, "model.layers.0.mlp.down_proj is stored as w8a8_dynamic, and ignore names it; legal is"),
        ({"config_groups__group_0__targets": ["re:.*mlp.*"]}, "self_attn.k_proj is stored as w8a8_dynamic, and no group of that format"),
        ({"config_groups__group_0__targets": []}, "is stored as w8a8_dynamic, and no group of that format targets it"),
    ],
)
def test_what_is_stored_as_integers_and_no_group_takes_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        formats_in(written(tmp_path, changed(**changes)))


def test_floats_that_still_have_scales_are_refused(tmp_path: Path) -> None:
    """A step would round activations of such a matrix; files that are `frozen` may hold some."""
    directory = written(tmp_path, changed(quantization_status="frozen"))
    tensors = load_file(directory / "model.safetensors")
    tensors[f"{IGNORED}.weight_scale"] = torch.ones(len(tensors[f"{IGNORED}.weight"]), 1)
    save_file(tensors, directory / "model.safetensors")
    formats, model = formats_in(directory), registry.find(directory).model
    assert formats is not None
    params = stored(model.family.abstract_params(model.config, torch.float32), Variant(formats=formats))
    with pytest.raises(CheckpointError, match=rf"tensor {IGNORED}.weight_scale is not part of the model"):
        checkpoint.load(checkpoint.open_checkpoint(directory), params)


PACKED, EXPERTS = (Path(__file__).parent / name for name in ("packed", "packed_experts"))
"""Checkpoints that compressed-tensors wrote, each with the matrices that it unpacks (fixtures/README.md)."""
WRITTEN = {"dense": (PACKED, 32, 7), "experts": (EXPERTS / "group", 32, 8), "experts, a scale a channel": (EXPERTS / "channel", 0, 8)}


def dequantised(leaf: Any, lead: int = 0) -> torch.Tensor:
    """The matrix [lead..., out..., K] that an int4 weight stands for."""
    scale = leaf["group_scale"]
    groups = unpack_w4(leaf["weight"]).unflatten(lead, (scale.shape[lead], -1))
    return (groups * scale.unsqueeze(lead + 1)).flatten(lead, lead + 1).movedim(lead, -1)


def opened(directory: Path, dtype: torch.dtype) -> tuple[Model, Model, Any]:
    """The model of floats, that of the checkpoint's formats, and its parameters."""
    formats, plain = formats_in(directory), registry.find(directory).model
    assert formats is not None
    grouped = plain.config.num_experts > 0
    own = replace(plain, config=replace(plain.config, variant=Variant(formats=formats, grouped=grouped)))
    return plain, own, checkpoint.load(checkpoint.open_checkpoint(directory), own.params(dtype))


def packed_leaves(directory: Path, dtype: torch.dtype) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Path, float parameter and value of all that is packed."""
    plain, _, params = opened(directory, dtype)
    for path, param in tree.flatten(plain.params(dtype)):
        leaf = params
        for key in path.split("."):
            leaf = leaf[int(key)] if isinstance(leaf, list) else leaf[key]
        if isinstance(leaf, dict) and "group_scale" in leaf:
            yield path, param, dequantised(leaf, 1 if param.role.startswith("experts") else 0).view(param.aval.shape)


def sources(tensors: dict[str, torch.Tensor], param: Any) -> list[torch.Tensor]:
    """The source tensors of a parameter; experts are one by one in the checkpoint."""

    def source(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name in tensors:
            return tensors[name]
        prefix, _, fused = name.rpartition(".")
        each = [[tensors[f"{prefix}.{e}.{part}.weight"] for part in PER_EXPERT[fused]] for e in range(shape[0])]
        return torch.stack([torch.cat(rows) for rows in each])

    return [source(*each) for each in zip(param.source.names, param.source.shapes, strict=True)]


@pytest.mark.parametrize(("directory", "group", "count"), WRITTEN.values(), ids=WRITTEN)
def test_packed_int4_is_what_the_library_makes_of_it(directory: Path, group: int, count: int) -> None:
    formats = formats_in(directory)
    assert formats is not None
    assert (formats.group, formats.stored) == (group, True)
    theirs, compared = load_file(directory / "decompressed.safetensors"), 0
    for path, param, value in packed_leaves(directory, torch.bfloat16):
        assert torch.equal(value.bfloat16(), param.source.join(*sources(theirs, param))), path
        compared += 1
    assert compared == count


@pytest.mark.parametrize("directory", [each[0] for each in WRITTEN.values()], ids=WRITTEN)
@torch.no_grad()
def test_packed_int4_computes_what_transformers_does_with_its_floats(tmp_path: Path, directory: Path) -> None:
    """Logits of a prompt and greedy tokens behind it, in float32."""
    stored = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items() if name.endswith(".weight")}
    for _, param, value in packed_leaves(directory, torch.float32):
        for name, tensor in zip(param.source.names, param.source.split(value), strict=True):
            stored[name] = tensor.contiguous()
    values = json.loads((directory / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(one_by_one(stored), tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = torch.randint(0, values["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(0))
    model, params = loaded(registry.find(directory), torch.float32)
    want = reference.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, pad_token_id=0)
    got = logits(model, params, want.int(), torch.float32)[0]
    torch.testing.assert_close(got, reference(want).logits[0], rtol=0, atol=1e-4)
    assert got[39:-1].argmax(-1).tolist() == want[0, 40:].tolist()


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose experts are apart."""
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, fused = name.rpartition(".")
        for e, expert in enumerate(tensor if fused in PER_EXPERT else ()):
            rows = expert.chunk(len(PER_EXPERT[fused]))
            apart |= {f"{prefix}.{e}.{part}.weight": own.contiguous() for part, own in zip(PER_EXPERT[fused], rows, strict=True)}
        if fused not in PER_EXPERT:
            apart[name] = tensor
    return apart


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


def test_static_experts_are_refused() -> None:
    experts = replace(
        registry.find("qwen3-30b-a3b").model.config, variant=Variant(formats=Formats((("*.experts.*", "w8a8"),)), grouped=True)
    )
    with pytest.raises(
        SpecError, match=r"experts\.gate_up_proj: the format is w8a8; legal for experts are float, w8a8_dynamic, w4a8_dynamic, w4a16"
    ):
        stored(registry.find("qwen3-30b-a3b").model.family.abstract_params(experts, torch.bfloat16), experts.variant)
