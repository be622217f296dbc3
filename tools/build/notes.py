"""What a plan says about the choices that it made for the user, beside those that say it where they are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...models.head_padding import KEYS, TITLES
from ...models.padding import paddings
from .deployments import deployment
from .deviations import deviations

if TYPE_CHECKING:
    from .plan import Options, Plan


def length_note(options: Options, plan: Plan) -> str | None:
    """Whether requests are shorter than the model can take."""
    length, longest = plan.limits.max_model_len, plan.source.max_position_embeddings
    if options.max_model_len is not None or plan.deployment or length >= longest:
        return None
    return f"context {length} of {longest} tokens (state has room for all of it; --max-model-len to change)"


def drafts_note(options: Options, plan: Plan) -> str | None:
    """What is drafted where nobody said so, and why nothing is where something could be."""
    k = plan.limits.drafts
    if not k and plan.source.model.has_draft_head and not plan.source.has_draft_head:
        return "no drafts: the checkpoint has no tensor of the draft head that its configuration declares"
    if options.num_speculative_tokens is not None or plan.deployment or not k:
        return None
    return f"each step drafts {k} tokens and verifies them in the next (--speculative-tokens to change)"


def deviation_notes(plan: Plan) -> tuple[str, ...]:
    """What the model and the machine change against the row that the build is for."""
    if not plan.deployment:
        return ()
    row = deployment(plan.deployment)
    return deviations(row, row.phase(plan.phase), plan.source)


def eos_notes(plan: Plan) -> Iterator[str]:
    """Which tokens end a response by which files, and those that can never be generated."""
    if plan.source.checkpoint_dir is None:
        return
    ends = ", ".join(f"{token} ({' and '.join(plan.source.eos_files[token])})" for token in plan.eos_ids)
    yield f"responses end at token {ends}" if ends else "no file names a token that ends responses: they end at their limits and stops"
    unreachable = sorted(set(plan.source.eos_ids) - set(plan.eos_ids))
    if unreachable:
        yield f"end-of-text ids {unreachable} lie outside the vocabulary of {plan.model.config.vocab_size} and end nothing"


def padding_notes(plan: Plan) -> Iterator[str]:
    """Sizes that ranks cannot share evenly."""
    names = {"vocab": "the vocabulary of", "ffn": "the feed-forward of"}
    declared = plan.model.family.abstract_params(plan.model.config, plan.dtype)
    for axis, size, padded, ranks in paddings(declared, plan.model.config.variant):
        yield f"{names[axis]} {size:,} is padded to {padded:,} over {ranks} ranks"
    variant = plan.model.config.variant
    for owner, each in (("", variant.heads), ("the draft head's ", variant.draft_heads)):
        for heads in each:
            idle = f", of which {heads.idle} have padding alone" if heads.idle else ""
            cached = ", in the cache too" if heads.kind == KEYS else ""
            wide = len(heads.places)
            yield f"{owner}{heads.real} {TITLES[heads.kind]} are padded to {wide} over {heads.ranks} ranks{idle}{cached}"
