"""Who decided each setting of a build: a flag, the row of a published deployment, the checkpoint, the plan, or a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...graphs.errors import SpecError

if TYPE_CHECKING:
    from .plan import Options, Plan

FLAG, ROW, CHECKPOINT, PLAN, DEFAULT = "flag", "row", "checkpoint", "plan", "default"
DECIDERS = (FLAG, ROW, CHECKPOINT, PLAN, DEFAULT)

SETTINGS = {
    "deployment": "deployment",
    "phase": "phase",
    "target": "target",
    "mesh": "mesh",
    "backend": "backend",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv-cache-dtype": "kv_cache_dtype",
    "buckets": "buckets",
    "prefill": "prefill",
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "max-total-tokens": "max_total_tokens",
    "kv-cache-memory": "kv_cache_memory",
    "speculative-tokens": "num_speculative_tokens",
    "draft-model": "draft_model",
    "draft-vocab-size": "draft_vocab_size",
    "max-logprobs": "max_logprobs",
    "structured-outputs": "structured_outputs",
    "weights": "weights",
    "cann": "cann",
    "operator-packages": "operator_packages",
}
"""Settings by the option of `npucompile build` that decides each, and its field of `plan.Options`."""

_OF_A_ROW = ("phase", "target", "mesh", "quantization", "buckets", "prefill", "max-model-len", "max-num-seqs", "max-total-tokens")
_OF_A_PLAN = ("max-num-seqs", "max-total-tokens", "weights")

Decided = tuple[tuple[str, str], ...]
"""Pairs of a setting and who decided it, in the order of SETTINGS."""


def decided(options: Options, plan: Plan, *, quantised: bool) -> Decided:
    """Who decided the settings of a plan.

    Args:
        quantised: whether the checkpoint's own description says how its matrices are stored.
    """
    repeated = read_decided(options.decided_by) if options.decided_by else {}
    return tuple((name, repeated.get(name) or _who(name, options, plan, quantised)) for name in SETTINGS)


def _who(name: str, options: Options, plan: Plan, quantised: bool) -> str:
    if getattr(options, SETTINGS[name]) not in (None, "auto", ()):
        return FLAG
    if plan.deployment and (name in _OF_A_ROW or (name == "speculative-tokens" and plan.limits.drafts)):
        return ROW if plan.published or name not in ("max-model-len", "max-num-seqs", "max-total-tokens") else PLAN
    if (name == "quantization" and quantised) or (name == "kv-cache-dtype" and quantised and plan.model.config.variant.formats.kv_cache):
        return CHECKPOINT
    if name == "dtype":
        return PLAN if len(plan.target.dtypes) > 1 else DEFAULT
    if name == "speculative-tokens" and not plan.source.has_draft_head:
        return CHECKPOINT
    if name in _OF_A_PLAN or (name == "draft-model" and plan.source.draft):
        return PLAN
    return DEFAULT


def changed(pairs: Decided, name: str) -> Decided:
    """The same where the plan decided a setting after all."""
    return tuple((setting, PLAN if setting == name else who) for setting, who in pairs)


def format_decided(pairs: Decided) -> str:
    """Pairs as the value of `--decided-by`, without those that flags decided; read_decided reads it back."""
    return ",".join(f"{name}={who}" for name, who in pairs if who != FLAG)


def read_decided(text: str) -> Mapping[str, str]:
    """Reads `--decided-by`; a setting that it leaves out was decided by a flag.

    Raises:
        SpecError: naming the setting or the decider that there is not.
    """
    given = {}
    for part in filter(None, text.split(",")):
        name, _, who = part.partition("=")
        if name not in SETTINGS or who not in DECIDERS:
            raise SpecError(f"--decided-by {part}: legal are {', '.join(SETTINGS)}, each = one of {', '.join(DECIDERS)}")
        given[name] = who
    return {name: given.get(name, FLAG) for name in SETTINGS}
