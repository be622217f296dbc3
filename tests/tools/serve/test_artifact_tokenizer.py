"""tools/serve/artifact_tokenizer.py: text needs a tokenizer; `test_checkpoint_texts.py` has tokenizers that work."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.graphs.errors import ArtifactError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.serve.artifact_tokenizer import codec_of, tokenizer_of
from npucompile.tools.serve.checkpoint_texts import replaced


def test_text_is_served_with_a_tokenizer_alone(tiny_artifact: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    assert codec_of(artifact).encode("a") == tokenizer_of(artifact).encode("a")  # type: ignore[union-attr]
    with pytest.raises(ArtifactError, match="has no tokenizer"):
        codec_of(replaced(artifact, tokenizer=None))
