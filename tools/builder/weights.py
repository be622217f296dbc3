"""Stores a checkpoint's weights in an artifact, one parameter at a time, or binds the checkpoint to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...graphs.errors import SpecError
from ...graphs.types import DTYPE_NAMES, Leaf
from ...lowering.artifact.artifact import ArtifactWriter
from ...models import programs, safetensors_files
from ...models.checkpoint import ParamReader
from ...models.draft_source import open_both
from ...models.expert_placement import ExpertPlacement
from ..progress import Progress
from .planned import Plan


def store_weights(plan: Plan, leaves: tuple[Leaf, ...], writer: ArtifactWriter, progress: Progress) -> tuple[str | None, str]:
    """Writes the parameters of a plan's checkpoint into the artifact, unless the previous build stored the same ones.

    Only one parameter and the tensors it is made of are in memory at a time; each tensor is read once.

    Args:
        leaves: the parameters' operand names and avals, in the order of the model's flattened parameters.

    Returns:
        Path of the file in the artifact (None for a model without a checkpoint), and the digest of the checkpoint,
        the draft model's included.

    Raises:
        CheckpointError: naming what is missing, misshapen, quantised, unused or unreadable.
    """
    if plan.source.checkpoint_dir is None:
        return None, "none"
    checkpoint = open_both(plan.source.checkpoint_dir, plan.source.draft)
    digest = safetensors_files.digest(checkpoint)
    previous = writer.previous.manifest if writer.previous else None
    same = (digest, leaves, plan.model.placement)
    was = previous and (previous.source_digest, previous.params, ExpertPlacement.recorded(previous.model))
    if previous and previous.weights and was == same and writer.keep(previous.weights):
        return previous.weights, digest
    reader = ParamReader(checkpoint, programs.params(plan.model, plan.dtype))
    path = writer.add_parts("weights", _parts(reader, leaves, progress), "safetensors")
    size = sum(leaf.aval.nbytes for leaf in leaves)
    progress.say(f"read {size / 1e6:.1f} MB of {DTYPE_NAMES[plan.dtype]} weights from {checkpoint.directory}")
    return path, digest


def bind_weights(plan: Plan) -> tuple[str, str]:
    """The absolute directory of a plan's checkpoint, and its digest, the draft model's included; only file headers and samples are read.

    Raises:
        CheckpointError: naming what is missing, misshapen, quantised, unused or unreadable.
        SpecError: the plan has no checkpoint.
    """
    if plan.source.checkpoint_dir is None:
        raise SpecError(f"{plan.source.name} is a set of sizes without weights; legal is a path to a checkpoint directory")
    checkpoint = open_both(plan.source.checkpoint_dir.resolve(), plan.source.draft)
    ParamReader(checkpoint, programs.params(plan.model, plan.dtype))
    return str(checkpoint.directory), safetensors_files.digest(checkpoint)


def _parts(reader: ParamReader, leaves: Sequence[Leaf], progress: Progress) -> Iterator[tuple[int, bytes | memoryview]]:
    """(offset, bytes) of the header and of every parameter, in file order except that parameters of the same tensors come together."""
    announced = {leaf.name: torch.empty(leaf.aval.shape, dtype=leaf.aval.dtype, device="meta") for leaf in leaves}
    header, offsets = safetensors_files.layout(announced)
    yield 0, header
    with progress.byte_bar("read weights", sum(leaf.aval.nbytes for leaf in leaves)) as bar:
        for group in sorted(reader.groups, key=lambda group: min(offsets[leaves[position].name] for position in group)):
            for position, tensor in reader.read(group):
                yield offsets[leaves[position].name], safetensors_files.bytes_of(tensor)
                bar.add(tensor.nbytes)
                del tensor  # frees it before the next one is read
