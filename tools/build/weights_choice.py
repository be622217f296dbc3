"""Decides whether an artifact holds its weights or refers to the checkpoint that has them."""

from __future__ import annotations

from ...graphs.errors import SpecError
from ...models.draft_source import open_both
from ...models.registry import ModelSource
from ...models.safetensors_files import NAMES, has_weights
from .choices import WEIGHTS
from .targets import Target

STORED_BYTES = 8 * 2**30
"""Checkpoints up to this size are copied into an artifact by default."""


def choose_weights(requested: str, source: ModelSource, target: Target, backend: str) -> tuple[str, str | None]:
    """Where the weights of an artifact are: "stored" in it, "bound" to it by reference, or "none"; and the reason if that was chosen.

    Bound weights stay in the checkpoint, are quantised and laid out when they are loaded, and need the checkpoint when serving.

    Args:
        requested: "auto", or one of the two.

    Raises:
        SpecError: the target or the model leaves no such choice.
        CheckpointError: the checkpoint cannot be read.
    """
    if requested not in WEIGHTS:
        raise SpecError(f"weights is {requested!r}; legal are {', '.join(WEIGHTS)}")
    if target.local and requested == "bound":
        raise SpecError(f"--weights bound for {target.name}: what runs here is proved with the weights of its artifact; legal is stored")
    directory = source.checkpoint_dir
    if directory is None:
        if requested != "auto":
            raise SpecError(f"--weights {requested}: {source.name} has no weights; legal is a path to a checkpoint directory")
        return "none", None
    if not target.local and (requested, backend) == ("auto", "null"):
        return "none", None
    if source.draft and source.draft.directory is None:
        raise SpecError(f"--draft-model {source.draft.name} has no weights, {source.name} has; legal is a path to a checkpoint directory")
    if target.local:
        return "stored", None
    if requested != "auto":
        return requested, None
    if not has_weights(directory):
        legal = ", ".join(name for names in NAMES for name in names)
        return "none", f"no weights: {directory} holds none of {legal}; serving needs --checkpoint DIR"
    size = open_both(directory, source.draft).nbytes
    if size <= STORED_BYTES:
        return "stored", f"weights: {size / 1e9:,.1f} GB are copied into the artifact (--weights bound to read {directory} when serving)"
    return "bound", f"weights: {size / 1e9:,.1f} GB stay in {directory}, which serving reads (--weights stored to copy them)"
