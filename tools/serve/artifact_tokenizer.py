"""The tokenizer that an artifact is served with: apart from the server, which `generate` does not load."""

from __future__ import annotations

from pathlib import Path

from ...lowering.artifact.artifact import Artifact
from ...server.text.tokenizer import TextTokenizer

TOKENIZER = "tokenizer.json"


def tokenizer_of(artifact: Artifact, checkpoint: Path | None = None) -> TextTokenizer | None:
    """The tokenizer of an artifact, or else of the checkpoint that it is served with; None where neither has one.

    Raises:
        ModelError: the checkpoint's tokenizer cannot be used.
    """
    stored = artifact.manifest.tokenizer
    path = artifact.path / stored if stored else checkpoint / TOKENIZER if checkpoint else None
    return TextTokenizer.load(path) if path and path.is_file() else None
