"""What becomes of flags that say whether a server takes pictures, how many, how large, and from where."""

from __future__ import annotations

from typing import Any

from ...serve.per_prompt import COUNT, KINDS
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule


@rule
def multimodal(value: Any, context: Context) -> Verdict:
    """Whether pictures are taken."""
    return _none_anyhow(context) or Verdict(MAPPED, context.option("encode"))


@rule
def text_alone(value: Any, context: Context) -> Verdict:
    """Whether no vision tower is loaded."""
    if not value:
        return multimodal(True, context)
    return _none_anyhow(context) or Verdict(
        CARRIED, f"{context.option('encode')} of build, and serve --language-model-only", ("--language-model-only",)
    )


@rule
def picture_limits(value: Any, context: Context) -> Verdict:
    """Most pictures of a request, by kind; vLLM may have their sizes beside it, which it reserves memory for."""
    if not isinstance(value, dict):
        return Verdict(REFUSED, f"it is no JSON object of counts of {', '.join(KINDS)}")
    counts = {kind: most.get(COUNT) if isinstance(most, dict) else most for kind, most in value.items()}
    if taken := [kind for kind, most in counts.items() if kind not in KINDS and most != 0]:
        return Verdict(
            REFUSED, f"{', '.join(taken)}: a request has {' and '.join(KINDS)} beside text, whose counts serve --limit-mm-per-prompt takes"
        )
    ours = {kind: most for kind, most in counts.items() if kind in KINDS}
    if not all(isinstance(most, int) and not isinstance(most, bool) and most >= 0 for most in ours.values()):
        return Verdict(REFUSED, "a count is a whole number of at least 0")
    if not ours:
        return Verdict(UNNECESSARY, f"nothing but {' and '.join(KINDS)} is taken beside text")
    text = ",".join(f"{kind}={most}" for kind, most in ours.items())
    return _none_anyhow(context) or Verdict(MAPPED, f"serve --limit-mm-per-prompt {text}", ("--limit-mm-per-prompt", text))


@rule
def media_hosts(value: Any, context: Context) -> Verdict:
    """Hosts that pictures are fetched from."""
    hosts = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    words = tuple(word for each in hosts for word in ("--allowed-media-host", each))
    return Verdict(MAPPED, f"serve {' '.join(words)}: no other host is asked, and no redirect is followed", words)


@rule
def processor_options(value: Any, context: Context) -> Verdict:
    """Options of the checkpoint's processor for all requests."""
    why = "a request says them itself, in mm_processor_kwargs; the largest of --encode bounds a picture for all of them"
    return Verdict(REFUSED, why) if value else Verdict(UNNECESSARY, "it is empty")


def _none_anyhow(context: Context) -> Verdict | None:
    """What is said where no picture would be taken whatever the line says."""
    proposal = context.proposal
    if context.facts.role == "decode":
        return Verdict(UNNECESSARY, "a server that only decodes reads no pictures")
    if proposal.plan is not None and proposal.plan.source.tower is None:
        return Verdict(UNNECESSARY, f"{proposal.model} has no vision tower")
    return None
