"""What becomes of flags that say what drafts."""

from __future__ import annotations

from typing import Any

from ..build.settings.model import MAX_DRAFTS
from .tables import topics
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule


@rule
def speculation(value: Any, context: Context) -> Verdict:
    """What drafts."""
    return _drafting(context)


def _drafting(context: Context) -> Verdict:
    asked, plan = context.facts.drafts, context.proposal.plan
    if not context.facts.drafts_by_heads:
        return Verdict(REFUSED, f"{context.facts.drafting}: {topics()['drafting'].why}")
    if asked > MAX_DRAFTS:
        return Verdict(
            REFUSED, f"a step drafts at most {MAX_DRAFTS} tokens, not {asked}: the recurrent kernel verifies 8 tokens of a request"
        )
    if context.row and context.facts.role == "prefill":
        return Verdict(MAPPED, context.row)
    if plan is not None and plan.limits.drafts < asked:
        wanted = "EAGLE-3 head" if context.facts.eagle else "draft head of its own"
        return Verdict(REFUSED, f"{context.proposal.model} has no {wanted} here; --draft-model of build names an EAGLE-3 head")
    head = context.proposal.arguments.get("draft-model")
    by = f" with --draft-model {head}" if head else "" if context.facts.eagle else ", drafted by the model's own head"
    return Verdict(MAPPED, context.option("speculative-tokens") + by)


@rule
def speculative_steps(value: Any, context: Context) -> Verdict:
    """Drafts of a step."""
    return _drafting(context) if _asked(context) else Verdict(UNNECESSARY, "nothing drafts without --speculative-algorithm")


def _asked(context: Context) -> bool:
    """Whether the line wants drafts; vLLM's flags need no other one."""
    return context.facts.engine == "vllm" or context.facts.has("speculation")


@rule
def draft_tokens(value: Any, context: Context) -> Verdict:
    """Tokens that a step verifies: the drafts and the last known one."""
    if not (_asked(context) and context.facts.drafts_by_heads):
        return speculative_steps(value, context)
    steps = context.facts.number("speculative_steps")
    if steps is not None and value != steps + 1:
        return Verdict(REFUSED, f"a chain of {steps} drafts verifies {steps + 1} tokens, not {value}; trees of drafts are not built")
    return _drafting(context)


@rule
def draft_model(value: Any, context: Context) -> Verdict:
    """The checkpoint that drafts."""
    if not (_asked(context) and context.facts.drafts_by_heads):
        return speculative_steps(value, context)
    if value == context.facts.values.get("model") and not context.facts.eagle:
        return Verdict(UNNECESSARY, "it is the model's own head, in its own checkpoint")
    head = context.proposal.arguments.get("draft-model")
    if head is not None:
        return Verdict(CARRIED if head == value else MAPPED, f"--draft-model {head}" + ("" if head == value else f": {value} is not here"))
    if context.proposal.deployment:
        return Verdict(MAPPED, f"{context.row}; --draft-model DIR takes this one")
    return Verdict(
        REFUSED, f"{value} is not here, and no preset of a draft head is for {context.proposal.model}; --draft-model DIR names one"
    )


@rule
def draft_quantization(value: Any, context: Context) -> Verdict:
    """Formats of the draft head."""
    if str(value) in ("unquant", "none", "None", "1", "True", "true"):
        return Verdict(UNNECESSARY, "a draft head stays as its checkpoint has it")
    return Verdict(REFUSED, "a draft head of a second checkpoint stays float; the model's own has the formats of its checkpoint")


@rule
def speculative_config(value: Any, context: Context) -> Verdict:
    """vLLM's drafting."""
    if not isinstance(value, dict):
        return Verdict(REFUSED, "it is no JSON object")
    verdict = _drafting(context)
    rest = [key for key in value if key not in ("method", "num_speculative_tokens", "model")]
    extra = f"; {', '.join(rest)}: the draft head is a part of the step's graph" if rest else ""
    return Verdict(verdict.status, verdict.why + extra)


@rule
def spec_method(value: Any, context: Context) -> Verdict:
    """What drafts."""
    return _drafting(context)


@rule
def spec_tokens(value: Any, context: Context) -> Verdict:
    """Drafts of a step."""
    return _drafting(context)
