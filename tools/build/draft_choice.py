"""Decides which draft model a build has: the one that the user names, or for a deployment that drafts the preset for its model."""

from __future__ import annotations

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


def draft_name(source: ModelSource) -> str:
    """The name or absolute path by which `with_draft_model` finds this draft model; "" without one."""
    if source.draft is None:
        return ""
    return str(source.draft.directory.resolve()) if source.draft.directory else source.draft.name
