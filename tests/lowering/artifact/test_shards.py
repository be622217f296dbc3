"""lowering/artifact/shards.py: the parts of all ranks are the whole, and each reads its own."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from npucompile.graphs.errors import ArtifactError, ArtifactTampered, PartitionError, SpecError
from npucompile.graphs.types import Aval, Leaf, Mesh, Rules
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.shards import coordinates, load_shard, local_aval, local_signature, local_slice, mesh_of

F32 = torch.float32
MESH = Mesh.parse("dp=2,tp=3")
RULES = Rules.of({"heads": "tp", "experts": ("dp", "tp"), "turned": ("tp", "dp"), "absent": "sp"})


def test_coordinates_are_row_major():
    assert [tuple(coordinates(MESH, rank).values()) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert coordinates(Mesh(), 0) == {}
    for rank in (-1, 6):
        with pytest.raises(SpecError, match=f"rank {rank} of mesh dp=2,tp=3; legal is 0 to 5"):
            coordinates(MESH, rank)


def test_a_slice_by_hand():
    aval = Aval((12, 5, 6), F32, ("experts", None, None))
    assert local_aval(aval, MESH, RULES) == Aval((2, 5, 6), F32, aval.axes)
    assert local_slice(aval, MESH, RULES, 4) == (slice(8, 10), slice(0, 5), slice(0, 6))
    assert local_slice(Aval((12,), F32, ("turned",)), MESH, RULES, 4) == (slice(6, 8),)
    assert local_slice(Aval((12, 6), F32, (None, "heads")), MESH, RULES, 4) == (slice(0, 12), slice(2, 4))
    assert local_slice(Aval((4,), F32, ("absent",)), MESH, RULES, 4) == (slice(0, 4),)
    assert local_slice(Aval((), F32), MESH, RULES, 5) == ()


MESHES = ["dp=2,tp=3", "tp=6", "dp=3,tp=1", ""]


@given(st.lists(st.sampled_from([None, "heads", "experts", "turned", "other"]), max_size=3), st.sampled_from(MESHES))
def test_parts_cover_the_whole_once_for_each_way_it_is_held(axes, mesh):
    if sum(axis in ("heads", "experts", "turned") for axis in axes) > 1:
        return
    parsed = Mesh.parse(mesh)
    aval = Aval(tuple(6 * (i + 1) for i in range(len(axes))), F32, tuple(axes))
    seen = torch.zeros(aval.shape)
    for rank in range(parsed.size):
        part = seen[local_slice(aval, parsed, RULES, rank)]
        assert tuple(part.shape) == local_aval(aval, parsed, RULES).shape
        part += 1
    ways = math.prod(parsed.axis(name) for axis in axes for name in RULES.mesh_axes(axis))
    assert (seen == parsed.size / ways).all()


def test_what_does_not_divide_is_refused():
    with pytest.raises(PartitionError, match="'heads' of size 4 does not divide by 3"):
        local_slice(Aval((4,), F32, ("heads",)), MESH, RULES, 0)
    with pytest.raises(PartitionError, match="both map to mesh axis 'tp'"):
        local_aval(Aval((6, 6), F32, ("heads", "experts")), MESH, RULES)


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
    return Artifact(path, manifest, ""), tensors


def test_each_rank_loads_its_part(tmp_path):
    made, tensors = artifact(tmp_path)
    for rank in range(6):
        held = load_shard(made, rank)
        assert list(held) == [leaf.name for leaf in PARAMS]
        assert torch.equal(held["params.experts"], tensors["params.experts"][rank : rank + 1])
        assert torch.equal(held["params.out"], tensors["params.out"][:, rank % 3 * 2 : rank % 3 * 2 + 2])
        assert torch.equal(held["params.norm"], tensors["params.norm"])
        assert held["params.scale"] == tensors["params.scale"]
        assert all(tensor.is_contiguous() for tensor in held.values())
        assert held["params.experts"].dtype == torch.bfloat16


def mapped(tensors, file):
    """Names of the tensors whose memory is a mapping of a file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    ranges = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]
    return {name for name, tensor in tensors.items() if any(tensor.data_ptr() in addresses for addresses in ranges)}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps")
def test_what_is_contiguous_in_the_file_is_mapped_and_not_copied(tmp_path):
    names, file = {leaf.name for leaf in PARAMS}, tmp_path / "w.safetensors"
    assert mapped(load_shard(artifact(tmp_path)[0], 1), file) == names - {"params.out"}
    assert mapped(load_shard(artifact(tmp_path, mesh="1")[0]), file) == names


def test_one_device_loads_all(tmp_path):
    made, tensors = artifact(tmp_path, mesh="1")
    assert mesh_of(made.manifest) == Mesh()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_shard(made).items())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params.out": None}, r"holds nothing as params.out; the manifest says f32\[4,6\]"),
        ({"params.out": torch.zeros(4, 9)}, r"holds \(4, 9\) as params.out; the manifest says f32\[4,6\]"),
        ({"params.out": torch.zeros(4, 6, dtype=torch.float16)}, r"holds torch.float16 as params.out; the manifest says f32\[4,6\]"),
    ],
)
def test_other_tensors_than_the_manifest_says(tmp_path, changed, message):
    made, _ = artifact(tmp_path, **changed)
    with pytest.raises(ArtifactTampered, match=message):
        load_shard(made, 1)


def test_a_file_that_cannot_be_read(tmp_path):
    made, _ = artifact(tmp_path)
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    with pytest.raises(ArtifactTampered, match=r"w\.safetensors"):
        load_shard(made, 1)
    with pytest.raises(ArtifactError, match="built without weights"):
        load_shard(artifact(tmp_path, weights=None)[0], 1)


def test_a_signature_holds_local_params_and_state_and_a_graphs_own_inputs(tmp_path):
    made, _ = artifact(tmp_path)
    inputs, outputs = (Leaf("inputs.x", Aval((6,), F32, ("heads",))),), (Leaf("outputs.y", Aval((6,), F32, ("heads",))),)
    signature = local_signature(made.manifest, SimpleNamespace(inputs=inputs, outputs=outputs))
    assert [leaf.aval.shape for leaf in signature.params] == [(1, 4), (4, 2), (4,), ()]
    assert [leaf.aval.shape for leaf in signature.state] == [(4, 2)]
    assert (signature.inputs, signature.outputs) == (inputs, outputs)
