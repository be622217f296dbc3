"""The shards of an artifact's operands that one rank of its mesh holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from safetensors import SafetensorError, safe_open

from ...graphs.errors import ArtifactTampered
from ...graphs.types import Leaf, Mesh, Rules, Signature
from .artifact import Artifact
from .manifest import GraphEntry, Manifest


def local_leaves(leaves: Iterable[Leaf], mesh: Mesh, rules: Rules) -> tuple[Leaf, ...]:
    """The same names, each with the shape of one rank's shard."""
    return tuple(Leaf(leaf.name, rules.local_aval(leaf.aval, mesh)) for leaf in leaves)


def local_signature(manifest: Manifest, entry: GraphEntry) -> Signature:
    """Calling convention of one graph on one rank. A manifest's params and state are global; a graph's inputs and outputs are local."""
    mesh, rules, whole = Mesh.parse(manifest.mesh), Rules.of(manifest.rules), manifest.signature(entry)
    return Signature(local_leaves(whole.params, mesh, rules), local_leaves(whole.state, mesh, rules), entry.inputs, entry.outputs)


def load_shard(artifact: Artifact, rank: int = 0) -> dict[str, torch.Tensor]:
    """A rank's parameters by operand name, contiguous; only its shards of the file are read.

    Raises:
        ArtifactError: the artifact was built without weights.
        ArtifactTampered: the file cannot be read, or its tensors differ from the manifest's.
    """
    manifest = artifact.manifest
    mesh, rules = Mesh.parse(manifest.mesh), Rules.of(manifest.rules)
    if mesh.size == 1 or manifest.weights is None:
        return artifact.load_weights()
    file = artifact.path / manifest.weights
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt") as weights:
            names = set(weights.keys())
            for leaf in manifest.params:
                if leaf.name not in names:
                    raise ArtifactTampered(f"{file}: holds nothing as {leaf.name}; the manifest says {leaf.aval}")
                stored = weights.get_slice(leaf.name)
                shape = tuple(stored.get_shape())
                if shape != leaf.aval.shape:
                    raise ArtifactTampered(f"{file}: holds {shape} as {leaf.name}; the manifest says {leaf.aval}")
                tensor = stored[rules.local_slice(leaf.aval, mesh, rank)] if shape else weights.get_tensor(leaf.name)
                if tensor.dtype != leaf.aval.dtype:
                    raise ArtifactTampered(f"{file}: holds {tensor.dtype} as {leaf.name}; the manifest says {leaf.aval}")
                tensors[leaf.name] = tensor.contiguous()
    except (SafetensorError, OSError) as error:
        raise ArtifactTampered(f"{file}: {error}") from None
    return tensors
