"""The tokenizer of an artifact; apart from what builds and from the server, for `generate` and for doors."""

from __future__ import annotations

from ...graphs.errors import ArtifactError
from ...lowering.artifact.artifact import Artifact
from ...server.text.tokenizer import TextTokenizer


def codec_of(artifact: Artifact) -> TextTokenizer:
    """The tokenizer that an artifact is served with.

    Raises:
        ArtifactError: it has none.
    """
    codec = tokenizer_of(artifact)
    if codec is None:
        raise ArtifactError(f"{artifact.path} has no tokenizer; serving text needs a checkpoint directory with tokenizer.json")
    return codec


def tokenizer_of(artifact: Artifact) -> TextTokenizer | None:
    """The tokenizer of an artifact; None where it has none.

    Raises:
        ModelError: it cannot be used.
    """
    stored = artifact.manifest.tokenizer
    return TextTokenizer.load(artifact.path / stored) if stored else None
