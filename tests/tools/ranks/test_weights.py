"""tools/ranks/weights.py: a rank gets its slices of the model's parameters from wherever they are, and nothing else is read or kept."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import modelslim, tiny

from npucompile.graphs import tree
from npucompile.graphs.errors import ArtifactError, ArtifactStale, ArtifactTampered, CheckpointError, SpecError
from npucompile.graphs.types import Leaf, Mesh, Rules
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import checkpoint as checkpoints
from npucompile.models.quant.description import formats_in
from npucompile.tools.ranks.launch import rank_identity
from npucompile.tools.ranks.rank_settings import RankSettings
from npucompile.tools.ranks.weights import check_checkpoint, placement_of, rank_params, served_digest

SCHEMES = ["none", "w8a8", "w4a8"]


def artifact_of(model, path, **options):
    """An artifact without graphs, and its plan."""
    plan = tiny.planned_device(model, **options)
    return tiny.without_graphs(plan, path), plan


def read(artifact, rank=0, checkpoint=None, wanted=None, shown=tiny.QUIET):
    return dict(rank_params(artifact, rank, checkpoint=checkpoint, wanted=wanted, progress=shown))


def altered(model, to):
    """A copy of a checkpoint with one other number."""
    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("weights", ["stored", "bound", "given"])
@pytest.mark.parametrize("quantization", SCHEMES)
def test_every_rank_gets_its_slices(model, tmp_path, quantization, weights):
    options = {"quantization": quantization, "weights": "stored" if weights == "stored" else "bound"}
    artifact, plan = artifact_of(model, tmp_path / "out", **options)
    given = shutil.copytree(model, tmp_path / "copy") if weights == "given" else None
    check_checkpoint(artifact, given)
    params = checkpoints.load(checkpoints.open_checkpoint(model), plan.model.params(plan.dtype))
    whole = {f"params.{path}": tensor for path, tensor in tree.flatten(params)}
    mesh, rules = Mesh.parse(artifact.manifest.mesh), Rules.of(artifact.manifest.rules)
    for rank in range(mesh.size):
        shard = read(artifact, rank, given)
        assert set(shard) == set(whole)
        for leaf in artifact.manifest.params:
            expected = whole[leaf.name][rules.local_slice(leaf.aval, mesh, rank)]
            assert shard[leaf.name].dtype == expected.dtype
            assert torch.equal(shard[leaf.name], expected), leaf.name
            assert shard[leaf.name].is_contiguous()


@pytest.mark.parametrize("name", ["dense_w8a8_dynamic", "moe_w4a8_smooth"])
def test_an_artifact_of_a_scheme_takes_the_integers_of_a_quantised_checkpoint(name, tmp_path):
    """It was built from sizes alone; the checkpoint that it is served from is of the same scheme."""
    fixture, sizes = modelslim.FIXTURES / name, tmp_path / "sizes"
    sizes.mkdir()
    shutil.copyfile(fixture / "config.json", sizes / "config.json")
    options = {"quantization": name.split("_")[1], "backend": "null", "mesh": "tp=2", "num_speculative_tokens": None}
    artifact, plan = artifact_of(sizes, tmp_path / "out", **options)
    if "moe" in name:
        # Its last layer's experts are int8, and those of the artifact are int4.
        with pytest.raises(ArtifactStale, match=r"params\.layers\.1\.mlp\.(gate_up|down)\S* .*build the artifact again"):
            read(artifact, 0, fixture)
        return
    model = replace(plan.model, config=replace(plan.model.config, variant=replace(plan.model.config.variant, formats=formats_in(fixture))))
    params = checkpoints.load(checkpoints.open_checkpoint(fixture), model.params(plan.dtype))
    mesh, rules = Mesh.parse(artifact.manifest.mesh), Rules.of(artifact.manifest.rules)
    for rank in range(mesh.size):
        shard = read(artifact, rank, fixture)
        for leaf, (_, tensor) in zip(artifact.manifest.params, tree.flatten(params), strict=True):
            assert torch.equal(shard[leaf.name], tensor[rules.local_slice(leaf.aval, mesh, rank)]), leaf.name


@pytest.mark.parametrize("weights", ["stored", "bound"])
def test_only_what_is_wanted_is_read_and_one_is_kept_at_a_time(model, tmp_path, monkeypatch, weights):
    artifact, _ = artifact_of(model, tmp_path / "out", weights=weights, quantization="w8a8")
    mesh, rules = Mesh.parse(artifact.manifest.mesh), Rules.of(artifact.manifest.rules)
    wanted = {leaf.name for leaf in artifact.manifest.params if ".layers.0." in leaf.name or leaf.name == "params.embed"}
    count, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: count.append(len(buffers[0])) or preadv(file, buffers, at))
    before = None
    names = set()
    for name, tensor in rank_params(artifact, 3, checkpoint=None, wanted=wanted, progress=tiny.QUIET):
        # Only the parameters of one group, which are made together, may be alive beside each other.
        assert before is None or before() is None
        before = weakref.ref(tensor)
        names.add(name)
        del tensor
    assert names == wanted
    local = sum(rules.local_aval(leaf.aval, mesh).nbytes for leaf in artifact.manifest.params if leaf.name in wanted)
    if weights == "stored":
        assert sum(count) == local
    else:
        whole = sum(entry.nbytes for entry in checkpoints.open_checkpoint(model).tensors.values())
        assert sum(count) < whole / 3


def test_without_weights_the_checkpoint_must_be_named(model, tmp_path):
    artifact, _ = artifact_of(model, tmp_path / "out", weights="bound")
    without = Artifact(artifact.path, replace(artifact.manifest, checkpoint=None, source_digest="none"), "")
    for call in (read, lambda opened: check_checkpoint(opened, None)):
        with pytest.raises(ArtifactError, match=r"out was built without weights: name the checkpoint with --checkpoint DIR, or build one"):
            call(without)
    check_checkpoint(without, model)
    assert set(read(without, checkpoint=model)) == {leaf.name for leaf in artifact.manifest.params}


def test_a_checkpoint_that_is_gone_is_named(model, tmp_path):
    moved = shutil.copytree(model, tmp_path / "there")
    artifact, _ = artifact_of(moved, tmp_path / "out", weights="bound")
    moved.rename(tmp_path / "elsewhere")
    for call in (read, lambda opened: check_checkpoint(opened, None)):
        with pytest.raises(ArtifactError, match=rf"{artifact.path} takes its weights from {moved}, which is not there; .* --checkpoint"):
            call(artifact)
    check_checkpoint(artifact, tmp_path / "elsewhere")
    assert read(artifact, checkpoint=tmp_path / "elsewhere")


@pytest.mark.parametrize("weights", ["stored", "bound"])
def test_another_checkpoint_is_refused_with_both_digests(model, tmp_path, weights):
    artifact, _ = artifact_of(model, tmp_path / "out", weights=weights)
    other = altered(model, tmp_path / "other")
    theirs = checkpoints.digest(checkpoints.open_checkpoint(other))
    with pytest.raises(
        CheckpointError, match=rf"{other} has digest {theirs}; {artifact.path} was built from {artifact.manifest.source_digest}"
    ):
        check_checkpoint(artifact, other)


def test_stored_weights_are_used_without_the_checkpoint(model, tmp_path):
    moved = shutil.copytree(model, tmp_path / "there")
    artifact, _ = artifact_of(moved, tmp_path / "out", weights="stored")
    shutil.rmtree(moved)
    check_checkpoint(artifact, None)
    assert len(read(artifact)) == len(artifact.manifest.params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("params.norm"), r"holds nothing as params\.norm; the manifest says bf16\[64\]"),
        (
            lambda tensors: tensors.update({"params.norm": torch.zeros(3)}),
            r"holds \(3,\) torch\.float32 as params\.norm; the manifest says",
        ),
        (
            lambda tensors: tensors.update({"params.norm": torch.zeros(64)}),
            r"holds \(64,\) torch\.float32 as params\.norm; the manifest says",
        ),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says_is_refused(model, tmp_path, change, message):
    artifact, _ = artifact_of(model, tmp_path / "out", weights="stored")
    file = artifact.path / artifact.manifest.weights
    tensors = load_file(file)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ArtifactTampered, match=message):
        read(artifact)
    file.write_bytes(b"nothing")
    with pytest.raises(ArtifactTampered, match="truncated or corrupt"):
        read(artifact)
    file.unlink()
    with pytest.raises(ArtifactTampered, match=r"no such file$"):
        read(artifact)


def test_parameters_of_another_npucompile_are_refused_by_name(model, tmp_path):
    artifact, _ = artifact_of(model, tmp_path / "out", weights="bound")
    params = artifact.manifest.params
    for changed, message in (
        ((Leaf("params.old", params[0].aval), *params[1:]), r"has the parameter params\.old .* where this npucompile has params\.embed"),
        (params[:-1], r"has the parameter nothing more where this npucompile has params\.\S+ "),
    ):
        with pytest.raises(ArtifactStale, match=message):
            read(Artifact(artifact.path, replace(artifact.manifest, params=changed), ""))


def test_what_does_not_fit_is_refused_by_name(model, tmp_path):
    """A preset has no digest to compare, but its checkpoint must have its tensors."""
    artifact, _ = artifact_of(model, tmp_path / "out", weights="bound")
    smaller = tiny.write_checkpoint(tmp_path / "smaller", **{**tiny.NPU_SIZES, "num_experts": 4})
    without = Artifact(artifact.path, replace(artifact.manifest, source_digest="none"), "")
    with pytest.raises(CheckpointError, match=r"config\.json: num_experts is 4; the graphs of .*out were built of sizes alone, with 8"):
        check_checkpoint(without, smaller)
    assert served_digest(artifact, smaller) == artifact.manifest.source_digest == served_digest(without, model)
    assert served_digest(without, smaller) not in (artifact.manifest.source_digest, served_digest(without, None))
    with pytest.raises(CheckpointError, match="has a wrong shape"):
        read(without, checkpoint=smaller)


ROWS = (
    [[*range(8)], [7, 6, 5, 4, 3, 2, 1, 0]] * 2,
    [[0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 0, 3]] * 4,
    [[5, 5, 1, 0, 4, 3, 2, 7, 6, 5, 1, 1], [3, 2, 1, 0, 4, 5, 7, 6, 0, 1, 2, 3]] * 2,
)
MAPS = [json.dumps({"physical_to_logical_map": rows}) for rows in ROWS]


@pytest.mark.parametrize("weights", ["stored", "bound"])
@pytest.mark.parametrize("quantization", SCHEMES)
def test_another_map_gives_what_its_own_build_has(model, tmp_path, quantization, weights):
    options = {"quantization": quantization, "weights": weights}
    one, other = (artifact_of(model, tmp_path / f"{number}", expert_map=MAPS[number], **options)[0] for number in (1, 2))
    placement = placement_of(one, MAPS[2])
    changed = 0
    for rank in range(4):
        served = dict(rank_params(one, rank, checkpoint=None, wanted=None, progress=tiny.QUIET, placement=placement))
        before = read(one, rank)
        for name, tensor in read(other, rank).items():
            assert torch.equal(served[name], tensor), name
            assert served[name].is_contiguous()
            changed += not torch.equal(tensor, before[name])
    assert changed >= 4 * 4 * 3, "the table, gate and up, and down of each layer"


def test_a_map_that_graphs_are_not_for_is_refused(model, tmp_path):
    mapped, plain = (artifact_of(model, tmp_path / name, expert_map=expert_map)[0] for name, expert_map in (("a", MAPS[1]), ("b", None)))
    assert placement_of(mapped, None) is None
    with pytest.raises(SpecError, match="has 8 physical experts, and 4 ranks share them; legal is 12, as it was built for"):
        placement_of(mapped, MAPS[0])
    with pytest.raises(SpecError, match="was built without a map, so its graphs name no physical experts"):
        placement_of(plain, MAPS[1])


def test_ranks_with_different_maps_do_not_meet(model, tmp_path):
    mapped = artifact_of(model, tmp_path / "mapped", expert_map=MAPS[1])[0]
    own, same, other = (rank_identity(mapped, RankSettings(device="emulated", expert_map=each)) for each in (None, MAPS[1], MAPS[2]))
    assert own == same
    assert {name for name in own if own[name] != other[name]} == {"expert map"}
