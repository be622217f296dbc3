"""What a plan says about the choices that it made for the user, beside those that say it where they are made."""

from __future__ import annotations

from collections.abc import Iterator

from ...graphs.steps.table import kind_of
from ...models.head_padding import KEYS, TITLES
from ...models.padding import paddings
from .deployments import deployment
from .deviations import deviations
from .planned import Plan


def say_ends(plan: Plan) -> Plan:
    """The plan with notes of what ends responses, and of sizes that ranks cannot share evenly."""
    return plan.noted(*_ends(plan), *_paddings(plan))


def say_deviations(plan: Plan) -> Plan:
    """The plan with notes of what the model and the machine change against the row that the build is for."""
    if not plan.deployment:
        return plan
    row = deployment(plan.deployment)
    encodes = any(kind_of(bucket).tower for bucket in plan.buckets)
    return plan.noted(
        *(f"differs from the deployment: {deviation}" for deviation in deviations(row, row.phase(plan.phase), plan.source, encodes))
    )


def _ends(plan: Plan) -> Iterator[str]:
    """Which tokens end a response by which files, and those that can never be generated."""
    if plan.source.checkpoint_dir is None:
        return
    ends = ", ".join(f"{token} ({' and '.join(plan.source.eos_files[token])})" for token in plan.eos_ids)
    yield f"responses end at token {ends}" if ends else "no file names a token that ends responses: they end at their limits and stops"
    unreachable = sorted(set(plan.source.eos_ids) - set(plan.eos_ids))
    if plan.source.tokenizer is None:
        yield "the checkpoint has no tokenizer.json: no server takes its text, and `generate` takes --token-ids alone"
    if unreachable:
        yield f"end-of-text ids {unreachable} lie outside the vocabulary of {plan.model.config.vocab_size} and end nothing"


def _paddings(plan: Plan) -> Iterator[str]:
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
