"""models/slices.py: a shard that is read by slices is the slice of the whole parameter, bit for bit, and nothing else is read."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny

from npucompile.graphs import tree
from npucompile.graphs.types import Aval, Mesh, Rules
from npucompile.models import checkpoint, registry, sharding_rules
from npucompile.models.checkpoint import ParamReader, open_checkpoint
from npucompile.models.params import Param, Parts, Source
from npucompile.models.quant import leaves
from npucompile.models.quant.recipes import formats_of_scheme
from npucompile.models.safetensors_files import TensorEntry
from npucompile.models.slices import Shard, boxes, region_shape, source_bytes, source_region
from npucompile.models.variant import Variant

MESHES = ["dp=2", "tp=2", "dp=2,tp=2"]
DENSE = {**tiny.CONFIG, **tiny.NPU_SIZES, "num_experts": 0, "intermediate_size": 48, "model_type": "qwen3_5_text"}
MOE = {**tiny.CONFIG, **tiny.NPU_SIZES}
NEXT = {
    **MOE, "model_type": "qwen3_next", "norm_topk_prob": True, "rope_theta": 1e4, "rope_parameters": None, "mtp_num_hidden_layers": None,
}  # fmt: skip
PLAIN = {**MOE, **tiny.NO_RECURRENT, "model_type": "qwen3_moe", "norm_topk_prob": True, "intermediate_size": 48, "mlp_only_layers": [1]}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Random checkpoints by (family, kv heads, layout), the last "fused" or "apart", which has a tensor for each expert."""
    written = {}
    for family, config in (("dense", DENSE), ("moe", MOE), ("next", NEXT), ("plain", PLAIN)):
        for heads in (1, 2):
            path = tmp_path_factory.mktemp(f"{family}{heads}")
            tiny.write_checkpoint(path / "fused", tokenizer=False, **{**config, "num_key_value_heads": heads})
            written[family, heads, "fused"] = path / "fused"
            written[family, heads, "apart"] = apart(path / "fused", path / "apart")
    return written


def apart(fused, directory):
    """The same tensors, expert by expert, in three shards."""
    directory.mkdir()
    (directory / "config.json").write_text((fused / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(fused / "model.safetensors").items():
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(name.rpartition(".")[2])
        if names is None:
            tensors[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            prefix = f"{name.rpartition('.')[0]}.{expert}"
            tensors |= {f"{prefix}.{part}.weight": half.clone() for part, half in zip(names, matrix.chunk(len(names)), strict=True)}
    placed = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name, at in placed.items() if at == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory


def model_of(directory, mesh, quantization="none", grouped=True):
    model = registry.find(directory).model
    experts = model.config.num_experts
    copies = max(1, mesh.axis("tp") // model.config.num_key_value_heads)
    variant = Variant(formats=formats_of_scheme(quantization, "qwen3.5-397b"), grouped=grouped and experts > 0, kv_repeat=copies)
    return replace(model, config=replace(model.config, variant=variant), drafting=True)


def expected_bytes(params, mesh, rules, copies):
    """Bytes of what a rank must read: of every source tensor its share, of heads that ranks share all."""
    shares = {}
    for _, param in tree.flatten(params):
        share = param.aval.nbytes // rules.local_aval(param.aval, mesh).nbytes
        for name, shape in zip(param.source.names, param.source.shapes, strict=True):
            shared = copies > 1 and name.endswith(("k_proj.weight", "v_proj.weight"))
            shares[name] = 4 * torch.Size(shape).numel() // (1 if shared else share)
    return sum(shares.values())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("quantization", ["none", "w8a8", "w4a8"])
@pytest.mark.parametrize(
    "written",
    [
        ("dense", 1, "fused"),
        ("dense", 2, "fused"),
        ("moe", 1, "fused"),
        ("moe", 2, "fused"),
        ("moe", 2, "apart"),
        ("next", 1, "apart"),
        ("next", 2, "fused"),
        ("plain", 1, "fused"),
        ("plain", 2, "apart"),
    ],
)
@pytest.mark.parametrize("block_bytes", [pytest.param(2**20, marks=pytest.mark.long), 5000])
def test_a_shard_is_the_slice_of_the_whole(directories, monkeypatch, written, quantization, mesh, block_bytes):
    directory, mesh = directories[written], Mesh.parse(mesh)
    model = model_of(directory, mesh, quantization)
    params = model.params(torch.bfloat16)
    rules = sharding_rules.rules(mesh, experts=model.config.num_experts, tokens=mesh.axis("tp"))
    whole, leaves = checkpoint.load(open_checkpoint(directory), params), tree.flatten(params)
    whole = [tensor for _, tensor in tree.flatten(whole)]
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read.append(len(buffers[0])) or preadv(file, buffers, at))
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", block_bytes)
    for rank in range(mesh.size):
        read.clear()
        reader = ParamReader(open_checkpoint(directory), params)
        shards = dict(pair for group in reader.groups for pair in reader.read(group, Shard(mesh, rules, rank)))
        assert sorted(shards) == list(range(len(leaves)))
        for position, (path, param) in enumerate(leaves):
            expected = whole[position][rules.local_slice(param.aval, mesh, rank)]
            assert (shards[position].shape, shards[position].dtype) == (expected.shape, expected.dtype), path
            assert torch.equal(shards[position], expected), path
            assert shards[position].is_contiguous()
        assert sum(read) == expected_bytes(params, mesh, rules, model.config.variant.kv_repeat)
        assert sum(read) == source_bytes([param for _, param in tree.flatten(params)], Shard(mesh, rules, rank), 4)


def test_experts_that_are_split_instead_of_spread_are_read_by_slices_too(directories, monkeypatch):
    directory, mesh = directories["moe", 2, "fused"], Mesh.parse("dp=2,tp=2")
    params = model_of(directory, mesh, grouped=False).params(torch.float32)
    rules = sharding_rules.rules(mesh, experts=8, expert_parallel=False)
    whole = [tensor for _, tensor in tree.flatten(checkpoint.load(open_checkpoint(directory), params))]
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read.append(len(buffers[0])) or preadv(file, buffers, at))
    reader = ParamReader(open_checkpoint(directory), params)
    for group in reader.groups:
        for position, tensor in reader.read(group, Shard(mesh, rules, 3)):
            aval = tree.flatten(params)[position][1].aval
            assert torch.equal(tensor, whole[position][rules.local_slice(aval, mesh, 3)])
    assert sum(read) == expected_bytes(params, mesh, rules, 1)


@pytest.mark.parametrize("layout", ["fused", "apart"])
def test_experts_are_read_and_quantised_once_and_in_blocks(directories, monkeypatch, layout):
    directory, mesh = directories["moe", 2, layout], Mesh.parse("tp=2")
    params = model_of(directory, mesh, "w4a8").params(torch.bfloat16)
    rules, block_bytes, sizes, calls = sharding_rules.rules(mesh, experts=8), 40_000, {}, []
    read_into, quantise_w4 = TensorEntry.read_into, leaves.quantise_w4_values

    def counted(entry, target, region=None):
        if ".experts" in entry.name:
            storage = target.untyped_storage().nbytes()
            sizes[entry.name] = max(sizes.get(entry.name, 0), storage)
        read_into(entry, target, region)

    monkeypatch.setattr(TensorEntry, "read_into", counted)
    monkeypatch.setattr(leaves, "quantise_w4_values", lambda weight, *rest: calls.append(weight.shape[0]) or quantise_w4(weight, *rest))
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", block_bytes)
    reader = ParamReader(open_checkpoint(directory), params)
    for group in reader.groups:
        for _ in reader.read(group, Shard(mesh, rules, 1)):
            pass
    # Four layers, two matrices of each; a rank's four experts in blocks of two, and of four for the smaller matrix.
    assert 0 < max(sizes.values()) <= block_bytes
    assert sum(calls) == 4 * 2 * 4
    assert set(calls) == {2, 4}


def test_an_axis_that_the_sources_do_not_have_is_sliced_after_the_join(tmp_path):
    """A scale of rows needs whole rows: the rank reads its columns' rows, and of the other axis all."""
    save_file({"w": torch.arange(24.0).view(4, 6)}, tmp_path / "model.safetensors")
    source = Source(("w",), ((4, 6),), lambda w: w / w.sum(1, keepdim=True), axes=(("rows", None),))
    params = {"w": Param(Aval((4, 6), torch.float32, ("rows", "columns")), source)}
    mesh, rules = Mesh.parse("dp=2,tp=3"), Rules.of({"rows": "dp", "columns": "tp"})
    reader = ParamReader(open_checkpoint(tmp_path), params)
    whole = torch.arange(24.0).view(4, 6)
    whole = whole / whole.sum(1, keepdim=True)
    for rank in range(6):
        ((_, tensor),) = reader.read(reader.groups[0], Shard(mesh, rules, rank))
        assert torch.equal(tensor, whole[rules.local_slice(params["w"].aval, mesh, rank)])


def test_parts_are_split_one_by_one():
    shard = Shard(Mesh.parse("tp=2"), Rules.of({"heads": "tp"}), 1)
    region = source_region((10, 3), (Parts("heads", (4, 6)), None), shard, frozenset({"heads"}))
    assert region == ((slice(2, 4), slice(7, 10)), (slice(0, 3),))
    assert region_shape(region) == (5, 3)
    assert list(boxes(region)) == [
        ((slice(2, 4), slice(0, 3)), (slice(0, 2), slice(0, 3))),
        ((slice(7, 10), slice(0, 3)), (slice(2, 5), slice(0, 3))),
    ]
