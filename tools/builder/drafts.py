"""Decides what drafts: a draft model that the user or a deployment asks for, or the model's own head."""

from __future__ import annotations

from ...graphs.errors import SpecError
from ...graphs.steps.table import kind_of
from ...graphs.types import Limits
from ...models import draft_vocabulary
from ...models.draft_source import with_draft_model
from ...models.presets import DRAFT_PRESETS
from ...models.registry import ModelSource
from ..notation import format_buckets
from .deployments import Deployment, deployment
from .instance import PlannedInstance
from .planned import Options, Plan, has_recurrent_states
from .settings.model import default_widths


def choose_draft_model(requested: str | None, source: ModelSource, row: Deployment | None, drafts: int | None) -> ModelSource:
    """The model with its draft model, if it has one.

    Published deployments of models without a draft head of their own draft with a second checkpoint that they do not name.

    Args:
        requested: preset name or checkpoint directory, or None.
        row: the deployment that the build is for, if any.
        drafts: tokens that each step drafts, or None.

    Raises:
        UnknownModel, ConfigError, CheckpointError: the draft model cannot be used with the model.
    """
    if requested is not None:
        return with_draft_model(source, requested)
    preset = next((name for name, preset in DRAFT_PRESETS.items() if preset["target"] == source.name), None)
    wanted = row is not None and row.num_speculative_tokens and drafts != 0 and not source.model.has_draft_head
    return with_draft_model(source, preset) if wanted and preset and source.checkpoint_dir is None else source


def decode_widths(options: Options, source: ModelSource, instance: PlannedInstance, limits: Limits) -> tuple[int, ...]:
    """Tokens of a request that decode steps verify; a server takes those that give most (runtime/scheduler/draft_widths.py).

    Raises:
        SpecError: widths that end elsewhere than at the last known token and all drafts, or several of recurrent states on an NPU.
    """
    most = limits.drafts + 1
    # Each is a kind of step to compile. Who names buckets names widths.
    several = instance.target.local and not instance.deployment and options.buckets is None
    widths = default_widths(several, limits.drafts) if options.draft_widths is None else options.draft_widths
    if widths[-1] != most:
        asked = f"--draft-widths {format_buckets(widths)}"
        raise SpecError(f"{asked}: a step of this build has up to {most} tokens of a request; legal are sizes up to exactly that")
    if len(widths) > 1 and not instance.target.local and has_recurrent_states(source.model, limits):
        # Their operators start a row from one of the slots that the step writes; behind a wider step that need not be one.
        asked = f"--draft-widths {format_buckets(widths)} on {instance.target.name}"
        raise SpecError(f"{asked}: {source.name} has recurrent states, whose operators of NPUs take one width; legal is {most}")
    return widths


def say_drafts(plan: Plan) -> Plan:
    """The plan with notes of what drafts where nobody said so, and why nothing does where something could."""
    published = deployment(plan.deployment).num_speculative_tokens if plan.deployment else 0
    requested, k, draft, own = plan.options.num_speculative_tokens, plan.limits.drafts, plan.source.draft, plan.source.model.has_draft_head
    note = None
    if published and plan.options.draft_model is None and requested != 0 and (draft or not own):
        said = f"the deployment drafts {published} tokens with a second checkpoint, which it does not name"
        note = f"draft model {draft.name}: {said} (--draft-model to change)" if draft else f"no drafts: {said} (--draft-model to name one)"
    if not k and own and not plan.source.has_draft_head:
        return plan.noted(note, "no drafts: the checkpoint has no tensor of the draft head that its configuration declares")
    if requested is not None or plan.deployment or not k:
        return plan.noted(note)
    widths = sorted({bucket.q_len - 1 for bucket in plan.buckets if kind_of(bucket).decodes})
    if len(widths) > 1:
        return plan.noted(note, f"steps draft {', '.join(map(str, widths))} tokens, as many as pay (--draft-widths to change)")
    return plan.noted(note, f"each step drafts {k} tokens and verifies them in the next (--speculative-tokens to change)")


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


def draft_vocab(requested: int | None, plan: Plan) -> int:
    """How many tokens may be drafted, the first ones of the vocabulary; 0 for all.

    Raises:
        SpecError: nothing is drafted, the draft head has a vocabulary of its own, or ranks cannot share so many rows.
    """
    if requested is None:
        return 0
    source = plan.source
    asked, vocab, ranks = f"--draft-vocab-size {requested}", source.model.config.vocab_size, plan.mesh.axis("tp")
    if not plan.limits.drafts:
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
