"""The weights of one rank, read a parameter at a time from the artifact or from the checkpoint that it refers to."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ...graphs import tree
from ...graphs.errors import ArtifactError, ArtifactStale, ArtifactTampered, CheckpointError, SpecError
from ...graphs.types import DTYPES, Leaf, Mesh, Rules, leaf_name
from ...lowering.artifact.artifact import Artifact
from ...models import programs, safetensors_files
from ...models.checkpoint import ParamReader
from ...models.draft_source import open_both, recorded
from ...models.expert_placement import ExpertPlacement
from ...models.params import EXPERTS, Param, Physical, Source, avals
from ...models.quant.description import formats_in
from ...models.slices import Shard, boxes, region_shape, sliced_axes, source_region
from ..artifact_model import full_model, with_variant
from ..builder.expert_map import fitted, read
from ..builder.targets import target
from ..progress import Progress
from .same_model import check_same_model

NO_DIGEST = "none"
"""`Manifest.source_digest` of an artifact that was built without a checkpoint."""


def rank_params(
    artifact: Artifact,
    rank: int,
    *,
    checkpoint: Path | None,
    wanted: Collection[str] | None,
    progress: Progress,
    placement: ExpertPlacement | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (operand name, a rank's shard of the parameter), contiguous, on the CPU.

    They come from `checkpoint` where it is given, else from the artifact's own file or from the checkpoint it refers to. Of tensors that
    are split over the ranks only this rank's part is read. Nothing is mapped, and a parameter that the caller keeps no reference to is
    freed before the next is read.

    Args:
        checkpoint: a directory that takes the place of the artifact's own, but not of its draft model's; whether it is the right one only
            `check_checkpoint` says.
        wanted: names of the operands that are read; None reads all.
        placement: of experts, in place of the artifact's own.

    Raises:
        ArtifactError: there are no weights, or the checkpoint that the artifact refers to is gone.
        ArtifactTampered: the artifact's file differs from its manifest.
        ArtifactStale: the artifact's parameters are not those of this npucompile.
        CheckpointError: naming the tensor that is missing, misshapen, quantised or unreadable.
    """
    leaves = tuple(leaf for leaf in artifact.manifest.params if wanted is None or leaf.name in wanted)
    mesh, rules = Mesh.parse(artifact.manifest.mesh), Rules.of(artifact.manifest.rules)
    shard, source = Shard(mesh, rules, rank), checkpoint_of(artifact, checkpoint)
    read = _stored(artifact, leaves, shard, placement) if source is None else _from_checkpoint(artifact, source, leaves, shard, placement)
    with progress.byte_bar("read weights", sum(rules.local_aval(leaf.aval, mesh).nbytes for leaf in leaves)) as bar:
        for name, tensor in read:
            nbytes = tensor.nbytes
            yield name, tensor
            bar.add(nbytes)
            del tensor  # frees it before the next one is read


def checkpoint_of(artifact: Artifact, checkpoint: Path | None) -> Path | None:
    """The directory that weights are read from; None where they are read from the artifact.

    Args:
        checkpoint: the one that the user named, or None.

    Raises:
        ArtifactError: there are no weights, or the directory that the artifact refers to is gone.
    """
    if checkpoint is not None:
        return checkpoint
    if artifact.manifest.weights is not None:
        return None
    if artifact.manifest.checkpoint is None:
        raise ArtifactError(f"{artifact.path} was built without weights: name the checkpoint with --checkpoint DIR, or build one")
    bound = Path(artifact.manifest.checkpoint)
    if not bound.is_dir():
        raise ArtifactError(
            f"{artifact.path} takes its weights from {bound}, which is not there; where the checkpoint moved, name it with --checkpoint DIR"
        )
    return bound


def check_checkpoint(artifact: Artifact, checkpoint: Path | None) -> None:
    """Refuses a checkpoint that is not the one the artifact was built from; reads samples of its files, so one process a host is enough.

    Args:
        checkpoint: the directory that the user named; None checks the one that the artifact refers to, if it does.

    Raises:
        ArtifactError: there are no weights, or the directory that the artifact refers to is gone.
        CheckpointError: the directory cannot be read, or has another digest, or another model than an artifact of sizes alone.
    """
    directory, expected = checkpoint_of(artifact, checkpoint), artifact.manifest.source_digest
    if directory is None:
        return
    if expected == NO_DIGEST:
        check_same_model(artifact, directory)
        return
    digest = safetensors_files.digest(open_both(directory, recorded(artifact.manifest.model)))
    if digest != expected:
        raise CheckpointError(
            f"{directory} has digest {digest}; {artifact.path} was built from {expected}: name that checkpoint, or build again"
        )


def served_digest(artifact: Artifact, checkpoint: Path | None) -> str:
    """Digest of the checkpoint whose weights are served: the artifact's, or where it was built without one that of the named directory.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    own = artifact.manifest.source_digest
    if own != NO_DIGEST or checkpoint is None:
        return own
    return safetensors_files.digest(open_both(checkpoint, recorded(artifact.manifest.model)))


def placement_of(artifact: Artifact, expert_map: str | None) -> ExpertPlacement | None:
    """The placement of a map that takes the place of the artifact's own; None without one.

    Raises:
        SpecError: the map cannot be read, is for another model or other ranks, or the artifact was built without one.
    """
    if expert_map is None:
        return None
    manifest, model = artifact.manifest, full_model(artifact.manifest)
    if model.placement is None:
        raise SpecError(
            f"--expert-map: {artifact.path} was built without a map, so its graphs name no physical experts; legal is an artifact of "
            "`npucompile build --expert-map FILE`"
        )
    mesh, variant = Mesh.parse(manifest.mesh), model.config.variant
    nodes = target(manifest.target).nodes(mesh)
    return fitted(read(expert_map), model, variant.expert_ranks, nodes, variant.physical_experts)


def _stored(
    artifact: Artifact, leaves: tuple[Leaf, ...], shard: Shard, placement: ExpertPlacement | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """From the artifact's file, in its order."""
    file, moved = artifact.path / str(artifact.manifest.weights), dict(_moved(artifact, placement)) if placement else {}
    try:
        entries = safetensors_files.entries_of(file)
        for leaf in leaves:
            _check_entry(file, leaf, entries.get(leaf.name))
        for leaf in sorted(leaves, key=lambda leaf: entries[leaf.name].begin):
            yield leaf.name, _read(entries[leaf.name], moved.get(leaf.name, _as_stored(leaf)), shard)
    except CheckpointError as error:
        raise ArtifactTampered(str(error)) from None


def _as_stored(leaf: Leaf) -> Param:
    return Param(leaf.aval, Source((leaf.name,), (leaf.aval.shape,)))


def _moved(artifact: Artifact, placement: ExpertPlacement) -> Iterator[tuple[str, Param]]:
    """The tables of another placement, and the experts that it has elsewhere as made of the artifact's own parameters, by operand."""
    manifest, model = artifact.manifest, full_model(artifact.manifest)
    both = (programs.params(replace(model, placement=each), DTYPES[manifest.dtype]) for each in (model.placement, placement))
    for (path, before), (_, after) in zip(*map(tree.flatten, both), strict=True):
        if not after.source.names:
            yield leaf_name("params", path), after
        elif before.logical is not None:
            places = tuple(before.logical.index(expert) for expert in after.logical)
            axes = tuple(Physical(places) if axis == EXPERTS else axis for axis in after.aval.axes)
            name = leaf_name("params", path)
            yield name, Param(after.aval, Source((name,), (after.aval.shape,), axes=(axes,)))


def _read(entry: safetensors_files.TensorEntry, param: Param, shard: Shard) -> torch.Tensor:
    """A rank's part of a parameter that is stored, or of what is made of nothing."""
    if not param.source.names:
        return param.source.join()[shard.rules.local_slice(param.aval, shard.mesh, shard.rank)].contiguous()
    region = source_region(param.aval.shape, param.source_axes[0], shard, sliced_axes([param], shard))
    parts = list(boxes(region))
    if len(parts) == 1:
        return entry.read_slice(parts[0][0])
    whole = torch.empty(region_shape(region), dtype=param.aval.dtype)
    for source, place in parts:
        whole[place] = entry.read_slice(source)
    return whole


def _check_entry(file: Path, leaf: Leaf, entry: safetensors_files.TensorEntry | None) -> None:
    dtype = safetensors_files.STORED_DTYPES.get(entry.dtype) if entry else None
    if entry is None or entry.shape != leaf.aval.shape or dtype != leaf.aval.dtype:
        stored = f"{entry.shape} {dtype or entry.dtype}" if entry else "nothing"
        raise ArtifactTampered(f"{file}: holds {stored} as {leaf.name}; the manifest says {leaf.aval}")


def _from_checkpoint(
    artifact: Artifact, directory: Path, leaves: tuple[Leaf, ...], shard: Shard, placement: ExpertPlacement | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """From a checkpoint, in the order of the model's parameters."""
    manifest = artifact.manifest
    # Formats of a checkpoint that is quantised decide what is read; the parameters must be those of the artifact either way.
    decodes_only = ("--phase", "decode") in itertools.pairwise(manifest.build_arguments)
    model, formats = full_model(manifest), formats_in(directory, decodes_only=decodes_only)
    if formats:
        model = with_variant(model, replace(model.config.variant, formats=formats))
        model = replace(model, tower=model.tower and replace(model.tower, variant=replace(model.tower.variant, formats=formats)))
    params = programs.params(replace(model, placement=placement or model.placement), DTYPES[manifest.dtype])
    _check_params(artifact, tree.leaves("params", avals(params)))
    reader, names = ParamReader(open_both(directory, recorded(manifest.model)), params), {leaf.name for leaf in leaves}
    operands = [leaf_name("params", path) for path, _ in tree.flatten(params)]
    for group in reader.groups:
        positions = [position for position in group if operands[position] in names]
        for position, tensor in reader.read(positions, shard) if positions else ():
            yield operands[position], tensor
            del tensor


def _check_params(artifact: Artifact, declared: tuple[Leaf, ...]) -> None:
    """Compares the parameters that the model declares now with those that the artifact was built with."""
    recorded = artifact.manifest.params
    for ours, theirs in itertools.zip_longest(declared, recorded):
        if ours != theirs:
            here, there = (f"{leaf.name} {leaf.aval}" if leaf else "nothing more" for leaf in (ours, theirs))
            raise ArtifactStale(f"{artifact.path} has the parameter {there} where this npucompile has {here}; build the artifact again")
