"""Decides which draft model a build has: the one that the user names, or for a deployment that drafts the preset for its model."""

from __future__ import annotations

from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...models import draft_vocabulary
from ...models.draft_source import with_draft_model
from ...models.presets import DRAFT_PRESETS
from ...models.registry import ModelSource
from .deployments import Deployment


def choose_draft_model(
    requested: str | None, source: ModelSource, row: Deployment | None, drafts: int | None
) -> tuple[ModelSource, str | None]:
    """The model with its draft model if it has one, and the reason if that was chosen.

    Published deployments of models without a draft head of their own draft with a second checkpoint that they do not name.

    Args:
        requested: preset name or checkpoint directory, or None.
        row: the deployment that the build is for, if any.
        drafts: tokens that each step drafts, or None.

    Raises:
        UnknownModel, ConfigError, CheckpointError: the draft model cannot be used with the model.
    """
    if requested is not None:
        return with_draft_model(source, requested), None
    published = row.num_speculative_tokens if row else 0
    if not published or drafts == 0 or source.model.has_draft_head:
        return source, None
    said = f"the deployment drafts {published} tokens with a second checkpoint, which it does not name"
    preset = next((name for name, preset in DRAFT_PRESETS.items() if preset["target"] == source.name), None)
    if preset is None or source.checkpoint_dir is not None:
        return source, f"no drafts: {said} (--draft-model to name one)"
    return with_draft_model(source, preset), f"draft model {preset}: {said} (--draft-model to change)"


def check_drafts(requested: int | None, source: ModelSource) -> None:
    """Refuses drafts of a head that only the configuration has.

    Args:
        requested: tokens that each step drafts, or None.

    Raises:
        SpecError: naming what declares the head, and what lacks it.
    """
    if requested and source.model.has_draft_head and not source.has_draft_head:
        head = source.model.family.draft_head
        fields = f" ({' or '.join(head.declared_by)})" if head and head.declared_by else ""
        raise SpecError(
            f"--speculative-tokens {requested}: config.json of {source.name} declares a draft head{fields}, and no tensor of it is in "
            f"{source.checkpoint_dir}; legal is 0, a checkpoint with the head, or one of a head in --draft-model"
        )


def draft_name(source: ModelSource) -> str:
    """The name or absolute path by which `with_draft_model` finds this draft model; "" without one."""
    if source.draft is None:
        return ""
    return str(source.draft.directory.resolve()) if source.draft.directory else source.draft.name


def draft_vocab(requested: int | None, source: ModelSource, drafts: int, mesh: Mesh) -> int:
    """How many tokens may be drafted, the first ones of the vocabulary; 0 for all.

    Raises:
        SpecError: nothing is drafted, the draft head has a vocabulary of its own, or ranks cannot share so many rows.
    """
    if requested is None:
        return 0
    asked, vocab, ranks = f"--draft-vocab-size {requested}", source.model.config.vocab_size, mesh.axis("tp")
    if not drafts:
        raise SpecError(f"{asked}: a step of this build drafts nothing; legal is a build with --speculative-tokens of at least 1")
    if source.draft is not None:
        raise SpecError(f"{asked}: the draft model {source.draft.name} has a vocabulary of its own; legal is the model's own draft head")
    head = source.model.family.draft_head
    if head is None or head.vocab_size is not draft_vocabulary.size:
        raise SpecError(
            f"{asked}: the draft head of family {source.model.family.name} cannot be cut; legal is one whose `DraftHead` has "
            "the `logits` of `decoder.draft_logits` and the `vocab_size` of `draft_vocabulary.size`"
        )
    if requested >= vocab or requested % ranks:
        shared = f", multiples of the {ranks} ranks that share them" if ranks > 1 else ""
        raise SpecError(f"{asked}: {source.name} has {vocab} tokens; legal are 1 to {vocab - 1}{shared}, and no option for all of them")
    return requested
