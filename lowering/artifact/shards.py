"""Turns an artifact's global operands into the part of them that one rank of its mesh holds.

A dimension whose logical axis maps to mesh axes is split into as many equal parts as those axes have devices together; a rank
holds the part numbered by its coordinates on them, row-major in the order the rules list them. All else is held whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from safetensors import SafetensorError, safe_open

from ...graphs.errors import ArtifactTampered, SpecError
from ...graphs.types import Aval, Leaf, Mesh, Rules, Signature
from .artifact import Artifact
from .manifest import GraphEntry, Manifest

ONE_DEVICE = "1"
"""How a manifest writes the mesh without axes."""


def mesh_of(manifest: Manifest) -> Mesh:
    """The mesh an artifact was built for."""
    return Mesh() if manifest.mesh == ONE_DEVICE else Mesh.parse(manifest.mesh)


def coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    """A rank's index on every axis of the mesh; ranks are numbered row-major.

    Raises:
        SpecError: when the mesh has no such rank.
    """
    if not 0 <= rank < mesh.size:
        raise SpecError(f"rank {rank} of mesh {mesh}; legal is 0 to {mesh.size - 1}")
    found: dict[str, int] = {}
    for name, size in reversed(mesh.axes):
        rank, found[name] = divmod(rank, size)
    return {name: found[name] for name, _ in mesh.axes}


def local_aval(aval: Aval, mesh: Mesh, rules: Rules) -> Aval:
    """What one rank holds of a global value; the same shape on all ranks.

    Raises:
        PartitionError: when a size does not divide, or two dimensions are split over one mesh axis.
    """
    rules.check(aval, mesh, str(aval))
    shape = tuple(size // rules.ways(axis, mesh) for size, axis in zip(aval.shape, aval.axes, strict=True))
    return Aval(shape, aval.dtype, aval.axes)


def local_slice(aval: Aval, mesh: Mesh, rules: Rules, rank: int) -> tuple[slice, ...]:
    """Where a rank's part of a global value lies in it.

    Raises:
        PartitionError: as `local_aval`.
        SpecError: when the mesh has no such rank.
    """
    at = coordinates(mesh, rank)
    slices = []
    for size, axis in zip(local_aval(aval, mesh, rules).shape, aval.axes, strict=True):
        part = 0
        for name in rules.mesh_axes(axis):
            part = part * mesh.axis(name) + at.get(name, 0)
        slices.append(slice(part * size, (part + 1) * size))
    return tuple(slices)


def local_leaves(leaves: Iterable[Leaf], mesh: Mesh, rules: Rules) -> tuple[Leaf, ...]:
    """The same names, with what one rank holds of each."""
    return tuple(Leaf(leaf.name, local_aval(leaf.aval, mesh, rules)) for leaf in leaves)


def local_signature(manifest: Manifest, entry: GraphEntry) -> Signature:
    """Calling convention of one graph on one rank: a manifest's params and state are global, a graph's inputs and outputs are not."""
    mesh, rules = mesh_of(manifest), Rules.of(manifest.rules)
    return Signature(local_leaves(manifest.params, mesh, rules), local_leaves(manifest.state, mesh, rules), entry.inputs, entry.outputs)


def load_shard(artifact: Artifact, rank: int = 0) -> dict[str, torch.Tensor]:
    """A rank's parameters by operand name, contiguous; only its part of the file is read.

    Raises:
        ArtifactError: the artifact was built without weights.
        ArtifactTampered: the file cannot be read, or holds other tensors than the manifest says.
    """
    manifest = artifact.manifest
    mesh, rules = mesh_of(manifest), Rules.of(manifest.rules)
    if mesh.size == 1 or manifest.weights is None:
        return artifact.load_weights()
    file = artifact.path / manifest.weights
    found: dict[str, torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt") as weights:
            names = set(weights.keys())
            for leaf in manifest.params:
                if leaf.name not in names:
                    raise ArtifactTampered(f"{file}: holds nothing as {leaf.name}; the manifest says {leaf.aval}")
                whole = weights.get_slice(leaf.name)
                shape = tuple(whole.get_shape())
                if shape != leaf.aval.shape:
                    raise ArtifactTampered(f"{file}: holds {shape} as {leaf.name}; the manifest says {leaf.aval}")
                tensor = whole[local_slice(leaf.aval, mesh, rules, rank)] if shape else weights.get_tensor(leaf.name)
                if tensor.dtype != leaf.aval.dtype:
                    raise ArtifactTampered(f"{file}: holds {tensor.dtype} as {leaf.name}; the manifest says {leaf.aval}")
                found[leaf.name] = tensor.contiguous()
    except (SafetensorError, OSError) as error:
        raise ArtifactTampered(f"{file}: {error}") from None
    return found
