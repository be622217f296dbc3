"""What becomes of flags that name checkpoints, and types of numbers."""

from __future__ import annotations

from typing import Any

from ..build.settings.model import KV_CACHE_DTYPES
from ..build.targets import target
from .facts import named_scheme
from .verdicts import CARRIED, MAPPED, REFUSED, UNNECESSARY, Context, Verdict, rule


@rule
def model(value: Any, context: Context) -> Verdict:
    """The checkpoint."""
    proposal = context.proposal
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
        return Verdict(
            REFUSED,
            "nothing is computed in fp8: blocks of a DeepSeek checkpoint in FP8 are read as floats, which --quantization rounds",
        )
    return Verdict(
        REFUSED,
        f"{value} is not built; legal are checkpoints of ModelSlim, compressed-tensors (int8 and int4) and DeepSeek's FP8, and the schemes "
        "of --quantization",
    )


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


@rule
def checksum(value: Any, context: Context) -> Verdict:
    """A digest of the checkpoint."""
    return Verdict(UNNECESSARY, "an artifact has a digest of its checkpoint, which is compared when weights are read")
