"""Tokenizer, ends and template of an artifact that was built without them, from the checkpoint that it is served with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...lowering.artifact.artifact import Artifact
from ...models import registry
from ...models.end_tokens import tokenizer_file
from ...models.family_file import FamilyFile
from ..ranks.weights import NO_DIGEST


def with_texts_of(artifact: Artifact, checkpoint: Path | None) -> Artifact:
    """The artifact with what the checkpoint that it is served with says of texts, where it was built of sizes alone, or has no tokenizer.

    Sizes know neither which tokens end a response nor how a chat is written.

    Raises:
        ModelError: a file of the checkpoint cannot be read.
    """
    manifest = artifact.manifest
    if checkpoint is None:
        return artifact
    file = tokenizer_file(checkpoint)
    tokenizer = str(file.resolve()) if file else manifest.tokenizer
    if manifest.source_digest != NO_DIGEST:
        return artifact if manifest.tokenizer else replaced(artifact, tokenizer=tokenizer)
    source = registry.find(checkpoint, FamilyFile.recorded(manifest.model))
    ends = [token for token in source.eos_ids if token < int(manifest.model["vocab_size"])]
    texts = {"special_tokens": dict(source.special_tokens), "sampling": dict(source.sampling), "template": source.chat_template}
    return replaced(artifact, tokenizer=tokenizer, model={**manifest.model, "eos_ids": ends, **texts})


def replaced(artifact: Artifact, **changes: object) -> Artifact:
    """The artifact whose manifest differs in these fields; a path in it may be absolute."""
    return Artifact(artifact.path, replace(artifact.manifest, **changes), artifact.digest)  # type: ignore[arg-type]
