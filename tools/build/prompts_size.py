"""How many prompts a prefill step of a published deployment takes: as many as its row says, or as a rank has memory for."""

from __future__ import annotations

from dataclasses import replace

from ...graphs.ir.trace import signature_of
from ...graphs.types import Bucket, Signature
from ...models import step
from .decisions import changed
from .memory import GIB, MemoryPlan
from .plan import Plan
from .rank_memory import partitioned_entry, rank_memory


def fit_prompts(plan: Plan) -> Plan:
    """The plan with the most prompts in a step that fit, at most those of its row; fewer are among its notes.

    The largest prefill is partitioned to know its activations. A plan whose weights and pools alone do not fit is left to
    `check_before_lowering`, which says what does.
    """
    together = max((bucket for bucket in plan.buckets if bucket.kind == "prefill"), default=None)
    if not plan.deployment or together is None or together.batch == 1:
        return plan
    signature = signature_of(step.program(plan.model, together, plan.limits, plan.dtype))
    if not rank_memory(plan, signature, ()).fits:
        return plan
    needed = _memory_with(plan, signature, together)
    prompts = together.batch
    while prompts > 1 and not _memory_with(plan, signature, replace(together, batch=prompts)).fits:
        prompts -= 1
    if prompts == together.batch:
        return plan
    note = (
        f"differs from the deployment: a prefill step takes at most {prompts} of {together.batch} prompts: with all of them a rank would "
        f"need {needed.total_bytes / GIB:.1f} of {needed.limit_bytes / GIB:.0f} GiB"
    )
    others = tuple(bucket for bucket in plan.buckets if bucket != together)
    smaller = replace(together, batch=prompts)
    buckets = others if smaller in others else tuple(sorted((*others, smaller), key=lambda bucket: (bucket.kind == "decode", bucket)))
    return replace(plan, buckets=buckets, notes=(*plan.notes, note), decided_by=changed(plan.decided_by, "prefill"))


def _memory_with(plan: Plan, signature: Signature, bucket: Bucket) -> MemoryPlan:
    """The memory plan of a rank as far as this bucket decides it."""
    return rank_memory(plan, signature, [partitioned_entry(plan, bucket)])
