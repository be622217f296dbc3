"""The parameters of a build: read from a checkpoint, stored in the artifact under the names of the graphs' operands."""

from __future__ import annotations

from safetensors.torch import save

from ...graphs import tree
from ...graphs.types import DTYPE_NAMES, Leaf
from ...lowering.artifact.artifact import ArtifactWriter
from ...models import checkpoint, safetensors_files
from ..progress import Progress
from .plan import Plan


def store_weights(plan: Plan, leaves: tuple[Leaf, ...], writer: ArtifactWriter, progress: Progress) -> tuple[str | None, str]:
    """Path of the parameters in the artifact, and the digest of what they were read from."""
    if plan.found.checkpoint_dir is None:
        return None, "none"
    source = safetensors_files.open_checkpoint(plan.found.checkpoint_dir)
    digest = safetensors_files.digest(source)
    before = writer.previous.manifest if writer.previous else None
    if before and before.weights and before.source_digest == digest and before.params == leaves and writer.keep(before.weights):
        return before.weights, digest
    params = checkpoint.load(source, plan.model.params(plan.dtype))
    tensors = {leaf.name: tensor.contiguous() for leaf, (_, tensor) in zip(leaves, tree.flatten(params), strict=True)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    progress.say(f"read {size / 1e6:.1f} MB of {DTYPE_NAMES[plan.dtype]} weights from {source.directory}")
    return writer.add("weights", save(tensors), "safetensors"), digest
