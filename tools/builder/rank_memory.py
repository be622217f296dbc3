"""The memory plan of one rank of a build, from its plan and the graphs known so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...graphs.ops import fused_experts
from ...graphs.steps.prefill import PREFILL
from ...graphs.steps.table import kind_of
from ...graphs.types import WORLD, Bucket, Signature
from ...lowering.artifact.artifact import GraphEntry, Manifest
from ...lowering.collectives_check import EXPERT_GROUPS
from ...models import expert_placement, programs
from ...models.variant import Variant
from . import memory
from .decisions import changed
from .planned import Plan


def share(bucket: Bucket, tokens: int, tp: int) -> int:
    """Tokens of one device in a pass over `tokens`: a group splits them if the bucket's step has at least a token per device."""
    return -(-tokens // tp) if bucket.tokens >= tp else tokens


def rank_memory(plan: Plan, leaves: Manifest | Signature, entries: Sequence[GraphEntry]) -> memory.MemoryPlan:
    """The memory plan of one rank; without entries, only its weights, pools and communication.

    Args:
        leaves: whose parameters and state are those of the plan.
    """
    return memory.plan_memory(
        leaves.params,
        leaves.state,
        plan.mesh,
        plan.rules(),
        plan.target,
        plan.limits,
        peak_bytes=max((entry.memory["peak_bytes"] for entry in entries), default=0),
        inputs_bytes=max((sum(leaf.aval.nbytes for leaf in (*entry.inputs, *entry.outputs)) for entry in entries), default=0),
        communicators=memory.communicators(plan.mesh, _groups(entries), _dispatch_window(plan), _fused_window(plan)),
        fused_bytes=_fused_workspace(plan),
        draft=f"params.{plan.model.family.draft_key}.",
        tower=f"params.{plan.model.family.tower.key}." if plan.model.family.tower else "",
    )


def planned_memory(plan: Plan) -> memory.MemoryPlan:
    """The memory plan of one rank before anything is traced: its weights, pools and communication."""
    return rank_memory(plan, programs.leaves(plan.model, plan.limits, plan.dtype), ())


def communicator_bytes(plan: Plan, entries: Sequence[GraphEntry]) -> dict[str, int]:
    """Size of one buffer of each communicator, by the symbol of its group in GE graphs; groups of one rank have none.

    Symbols of the same ranks, such as "tp" and "world" where dp is 1, share a communicator and so have the same size.
    """
    sizes = {symbol: memory.HCCL_BUFFER_BYTES for symbol in sorted(_groups(entries)) if len(plan.mesh.group(symbol, 0)) > 1}
    own = memory.communicators(plan.mesh, (), _dispatch_window(plan), _fused_window(plan))
    return sizes | {communicator.name: communicator.buffer_bytes for communicator in own}


def _groups(entries: Sequence[GraphEntry]) -> set[str]:
    """Groups of collectives besides those of experts, which have their own; without entries, those of most models."""
    if not entries:
        return {"tp", WORLD}
    return {group for entry in entries for name, group, _ in entry.collectives if name not in EXPERT_GROUPS}


def _dispatch_window(plan: Plan) -> int:
    """Bytes of the buffer that expert dispatch needs for the most tokens that are dispatched at once; 0 where none are."""
    config, ranks = plan.model.config, plan.mesh.size
    experts = expert_placement.count(config)
    most = config.variant.most_dispatched
    passes = [tokens for tokens in _rank_tokens(plan, fused=False) if tokens <= most or config.variant.dispatches_in_parts]
    tokens = min(max(passes, default=0), most)
    if not (experts and ranks > 1 and tokens):
        return 0
    return memory.dispatch_window_bytes(plan.target, tokens, config.hidden_size, experts, config.num_experts_per_tok, ranks)


def _fused_tokens(plan: Plan) -> int:
    """Most tokens of a rank that one operation of fused experts takes; 0 where there is none."""
    variant: Variant = plan.model.config.variant
    return min(max(_rank_tokens(plan, fused=True), default=0), variant.most_dispatched)


def _fused_window(plan: Plan) -> int:
    config, tokens = plan.model.config, _fused_tokens(plan)
    return fused_experts.window_bytes(tokens, config.hidden_size, config.num_experts_per_tok) if tokens else 0


def _fused_workspace(plan: Plan) -> int:
    config, tokens = plan.model.config, _fused_tokens(plan)
    if not tokens:
        return 0
    sizes = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok, expert_placement.count(config)
    return fused_experts.workspace_bytes(tokens, *sizes, plan.mesh.size)


def check_before_lowering(plan: Plan, manifest: Manifest) -> None:
    """Refuses weights and pools that exceed a rank's memory, before minutes of lowering.

    Raises:
        SpecError: naming every part of the memory, and the largest settings that fit.
    """
    if not rank_memory(plan, manifest, ()).fits:
        # The advice must leave room for activations, so the largest graphs are partitioned to know them.
        partitioned_memory(plan).check()


def partitioned_memory(plan: Plan) -> memory.MemoryPlan:
    """The memory plan of one rank before anything is lowered, with the largest bucket of each kind as far as partitioning tells."""
    return rank_memory(plan, programs.leaves(plan.model, plan.limits, plan.dtype), _largest_partitioned(plan))


def _largest_partitioned(plan: Plan) -> list[GraphEntry]:
    """Entries of the largest bucket of each kind, as far as partitioning tells."""
    largest = {bucket.kind: bucket for bucket in sorted(plan.buckets, key=lambda bucket: bucket.tokens)}
    return [partitioned_entry(plan, bucket) for bucket in largest.values()]


def partitioned_entry(plan: Plan, bucket: Bucket) -> GraphEntry:
    """What partitioning tells of a bucket's graph: its inputs, outputs, live values and collectives."""
    # What partitions takes seconds to import, and the memory of a plan needs nothing of it.
    from .stages import partition_bucket

    partitioned = partition_bucket(plan, bucket)[1]
    signature, peak = partitioned.signature, {"peak_bytes": partitioned.memory().peak_bytes}
    return GraphEntry(bucket, signature.inputs, signature.outputs, None, "", "", None, {}, peak, partitioned.collectives, {})


def _rank_tokens(plan: Plan, fused: bool) -> Iterator[int]:
    """Tokens of one rank in each pass over layers whose experts are fused or not: the model's, and the draft head's with one token a row,
    whose experts are not quantised and so never fused."""
    variant, tp = plan.model.config.variant, plan.mesh.axis("tp")
    for bucket in (bucket for bucket in plan.buckets if not kind_of(bucket).tower):
        tokens = share(bucket, bucket.tokens, tp)
        if variant.fuses(tokens) == fused:
            yield tokens
        if plan.limits.drafts and not fused:
            yield share(bucket, bucket.batch, tp)


def fit_prompts(plan: Plan) -> Plan:
    """The plan with the most prompts in a step that fit, at most those of its row; fewer are among its notes.

    The largest prefill is partitioned to know its activations. A plan whose weights and pools alone do not fit is left to
    `check_before_lowering`, which says what does.
    """
    together = max(PREFILL.among(plan.buckets), default=None)
    if not plan.deployment or together is None or together.batch == 1:
        return plan
    signature = programs.leaves(plan.model, plan.limits, plan.dtype)
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
        f"need {needed.total_bytes / memory.GIB:.1f} of {needed.limit_bytes / memory.GIB:.0f} GiB"
    )
    others = tuple(bucket for bucket in plan.buckets if bucket != together)
    smaller = replace(together, batch=prompts)
    buckets = others if smaller in others else tuple(sorted((*others, smaller), key=lambda bucket: (kind_of(bucket).decodes, bucket)))
    return replace(plan, buckets=buckets, decided_by=changed(plan.decided_by, "prefill")).noted(note)


def _memory_with(plan: Plan, signature: Signature, bucket: Bucket) -> memory.MemoryPlan:
    """The memory plan of a rank as far as this bucket decides it."""
    return rank_memory(plan, signature, [partitioned_entry(plan, bucket)])
