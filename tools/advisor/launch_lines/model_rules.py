"""What becomes of flags that name checkpoints, types of numbers, and what drafts."""

from __future__ import annotations

import json
from typing import Any

from ...builder.settings.model import KV_CACHE_DTYPES, MAX_DRAFTS
from ...builder.targets import target
from .names import named_scheme, unread_form
from .tables import topics
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule, rule_of, topic


@rule
def model(value: Any, context: Context) -> Verdict:
    """The checkpoint."""
    proposal = context.proposal
    if not proposal.known:
        return Verdict(REFUSED, unread_form(str(value)) or f"{value} is not here, nor known by name; legal is import with --model")
    if proposal.model == value:
        return Verdict(CARRIED, f"npucompile build {value}")
    if str(value).startswith(("/", "~")) and "$" not in str(value):
        why = f"{value} is built as {proposal.model}; serve reads its weights with --checkpoint"
        return Verdict(MAPPED, why, ("--checkpoint", str(value)))
    return Verdict(MAPPED, f"{value} is built as {proposal.model}; serve takes the directory of its weights with --checkpoint DIR")


@rule
def tokenizer(value: Any, context: Context) -> Verdict:
    """A tokenizer apart from the checkpoint."""
    if value == context.facts.values.get("model"):
        return Verdict(UNNECESSARY, "it is the checkpoint's own, which a build takes in any case")
    return Verdict(REFUSED, "the tokenizer is the checkpoint's tokenizer.json; put that file into its directory")


@rule
def dtype(value: Any, context: Context) -> Verdict:
    """Computing type."""
    legal = target(context.proposal.target).dtypes
    if value in legal:
        return Verdict(CARRIED, f"--dtype {value}")
    if value == "auto":
        return Verdict(UNNECESSARY, f"{' or '.join(legal)} is what {context.proposal.target} computes in")
    return Verdict(REFUSED, f"{context.proposal.target} computes in {' or '.join(legal)}")


@rule
def quantization(value: Any, context: Context) -> Verdict:
    """Scheme of the weights."""
    ours, scheme = context.proposal.arguments.get("quantization"), context.facts.scheme
    if context.proposal.deployment:
        return Verdict(MAPPED, context.row)
    if value in ("modelslim", "ascend", "compressed-tensors", "w8a8_int8"):
        if ours is not None:
            said = (
                ""
                if value == "w8a8_int8"
                else f", which the checkpoint's name says ({named_scheme(str(context.facts.values.get('model')))[1]})"
            )
            return Verdict(MAPPED, f"--quantization {ours}{said}")
        if scheme is None and context.proposal.plan is not None and context.proposal.plan.source.checkpoint_dir is None:
            return Verdict(
                REFUSED, "neither the flag nor the checkpoint's name says w8a8, w4a8 or w4a16; build with --quantization of one of them"
            )
        return Verdict(UNNECESSARY, "the checkpoint's own description says how each matrix is stored")
    if value in ("none", "None", "unquant"):
        return Verdict(UNNECESSARY, "weights stay as the checkpoint has them")
    if value == "fp8":
        return Verdict(REFUSED, "nothing is computed in fp8: checkpoints in FP8 are read as floats, which --quantization rounds")
    return Verdict(
        REFUSED,
        f"{value} is not built; legal are checkpoints of ModelSlim, compressed-tensors, and FP8 as DeepSeek has it, and the schemes "
        "of --quantization",
    )


SWITCHES = ("use_index_cache",)
"""Keys among the overridden fields that are that engine's own: layers share an indexer where the model's fields say so."""


@rule
def config_overrides(value: Any, context: Context) -> Verdict:
    """Fields that take the place of the checkpoint's."""
    refused, plan = topic("config_override"), context.proposal.plan
    if plan is None or not isinstance(value, dict):
        return refused
    fields = json.loads(plan.source.text)
    fields |= fields.get("text_config") or {}
    others = {name: json.dumps(each) for name, each in value.items() if name not in SWITCHES and fields.get(name) != each}
    if others:
        return Verdict(REFUSED, f"{', '.join(f'{name} is {each}' for name, each in others.items())}: {refused.why}")
    return Verdict(UNNECESSARY, "the model's config.json says the same")


@rule
def kv_cache_dtype(value: Any, context: Context) -> Verdict:
    """Type of cached keys and values."""
    ours = {"bf16": "bfloat16"}.get(value, value)
    if ours in KV_CACHE_DTYPES:
        return Verdict(CARRIED if ours == value else MAPPED, f"--kv-cache-dtype {ours}")
    return Verdict(REFUSED, f"legal are {', '.join(KV_CACHE_DTYPES)}")


@rule
def state_dtype(value: Any, context: Context) -> Verdict:
    """Type of recurrent states."""
    plan = context.proposal.plan
    if context.row:
        return Verdict(MAPPED, context.row)
    ours = str(target(context.proposal.target).state_dtype).removeprefix("torch.")
    if value in (ours, "auto") or plan is None:
        return Verdict(CARRIED if value == ours else UNNECESSARY, f"recurrent states are {ours} on {context.proposal.target}")
    return Verdict(
        REFUSED, f"recurrent states are {ours} on {context.proposal.target}; --operator-packages vllm-ascend of build makes them float32"
    )


@rule_of("speculation", "spec_method", "spec_tokens")
def drafting(value: Any, context: Context) -> Verdict:
    """What drafts, and how many tokens of a step."""
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
    return drafting(value, context) if _asked(context) else Verdict(UNNECESSARY, "nothing drafts without --speculative-algorithm")


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
    return drafting(value, context)


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
    verdict = drafting(value, context)
    rest = [key for key in value if key not in ("method", "num_speculative_tokens", "model")]
    extra = f"; {', '.join(rest)}: the draft head is a part of the step's graph" if rest else ""
    return Verdict(verdict.status, verdict.why + extra)
