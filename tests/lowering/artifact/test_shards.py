"""lowering/artifact/shards.py: each rank loads its own shards."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from npucompile.graphs.errors import ArtifactError, ArtifactTampered
from npucompile.graphs.types import Aval, Leaf, Rules, Signature
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.shards import load_shard, local_signature

F32 = torch.float32
RULES = Rules.of({"heads": "tp", "experts": ("dp", "tp"), "turned": ("tp", "dp"), "absent": "sp"})


PARAMS = (
    Leaf("params.experts", Aval((6, 4), torch.bfloat16, ("experts", None))),
    Leaf("params.out", Aval((4, 6), F32, (None, "heads"))),
    Leaf("params.norm", Aval((4,), F32, (None,))),
    Leaf("params.scale", Aval((), F32)),
)


def artifact(path, mesh="dp=2,tp=3", weights="w.safetensors", params=PARAMS, **changed):
    tensors = {leaf.name: torch.arange(math.prod(leaf.aval.shape)).reshape(leaf.aval.shape).to(leaf.aval.dtype) for leaf in PARAMS}
    save_file({name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}, path / "w.safetensors")
    manifest = SimpleNamespace(mesh=mesh, rules=dict(RULES.table), weights=weights, params=params, state=PARAMS[1:2])
    manifest.signature = lambda entry: Signature(params, manifest.state, entry.inputs, entry.outputs)
    return Artifact(path, manifest, ""), tensors


def test_each_rank_loads_its_part(tmp_path):
    opened, tensors = artifact(tmp_path)
    for rank in range(6):
        shard = load_shard(opened, rank)
        assert list(shard) == [leaf.name for leaf in PARAMS]
        assert torch.equal(shard["params.experts"], tensors["params.experts"][rank : rank + 1])
        assert torch.equal(shard["params.out"], tensors["params.out"][:, rank % 3 * 2 : rank % 3 * 2 + 2])
        assert torch.equal(shard["params.norm"], tensors["params.norm"])
        assert shard["params.scale"] == tensors["params.scale"]
        assert all(tensor.is_contiguous() for tensor in shard.values())
        assert shard["params.experts"].dtype == torch.bfloat16


def mapped(tensors, file):
    """Names of the tensors whose memory is mapped from a file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    ranges = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]
    return {name for name, tensor in tensors.items() if any(tensor.data_ptr() in addresses for addresses in ranges)}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps")
def test_what_is_contiguous_in_the_file_is_mapped_and_not_copied(tmp_path):
    names, file = {leaf.name for leaf in PARAMS}, tmp_path / "w.safetensors"
    assert mapped(load_shard(artifact(tmp_path)[0], 1), file) == names - {"params.out"}
    assert mapped(load_shard(artifact(tmp_path, mesh="1")[0]), file) == names


def test_one_device_loads_all(tmp_path):
    opened, tensors = artifact(tmp_path, mesh="1")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_shard(opened).items())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params.out": None}, r"holds nothing as params.out; the manifest says f32\[4,6\]"),
        ({"params.out": torch.zeros(4, 9)}, r"holds \(4, 9\) as params.out; the manifest says f32\[4,6\]"),
        ({"params.out": torch.zeros(4, 6, dtype=torch.float16)}, r"holds torch.float16 as params.out; the manifest says f32\[4,6\]"),
    ],
)
def test_other_tensors_than_the_manifest_says(tmp_path, changed, message):
    opened, _ = artifact(tmp_path, **changed)
    with pytest.raises(ArtifactTampered, match=message):
        load_shard(opened, 1)


def test_a_file_that_cannot_be_read(tmp_path):
    opened, _ = artifact(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArtifactTampered, match=r"w\.safetensors"):
        load_shard(opened, 1)
    with pytest.raises(ArtifactError, match="built without weights"):
        load_shard(artifact(tmp_path, weights=None)[0], 1)


def test_a_signature_holds_local_params_and_state_and_a_graphs_own_inputs(tmp_path):
    opened, _ = artifact(tmp_path)
    inputs, outputs = (Leaf("inputs.x", Aval((6,), F32, ("heads",))),), (Leaf("outputs.y", Aval((6,), F32, ("heads",))),)
    signature = local_signature(opened.manifest, SimpleNamespace(inputs=inputs, outputs=outputs))
    assert [leaf.aval.shape for leaf in signature.params] == [(1, 4), (4, 2), (4,), ()]
    assert [leaf.aval.shape for leaf in signature.state] == [(4, 2)]
    assert (signature.inputs, signature.outputs) == (inputs, outputs)
