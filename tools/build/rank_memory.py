"""The memory plan of one rank of a build, from its plan and the graphs known so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graphs.types import Leaf
from ...lowering.artifact.artifact import GraphEntry, Manifest
from ..verify.small_model import share
from . import memory
from .plan import Plan
from .stages import partition_bucket


def rank_memory(plan: Plan, manifest: Manifest, entries: Sequence[GraphEntry]) -> memory.MemoryPlan:
    """The memory plan of one rank; without entries, only its weights, pools and communication."""
    config, ranks = plan.model.config, plan.mesh.size
    experts = getattr(config, "num_experts", 0)
    dispatched = max((tokens for tokens in _rank_tokens(plan) if tokens <= config.variant.most_dispatched), default=0)
    window = 0
    if experts and ranks > 1 and dispatched:
        window = memory.dispatch_window_bytes(plan.target, dispatched, config.hidden_size, experts, config.num_experts_per_tok, ranks)
    groups = {group for entry in entries for _, group, _ in entry.collectives} or {"tp", "world"}
    return memory.plan_memory(
        manifest.params,
        manifest.state,
        plan.mesh,
        plan.rules(),
        plan.target,
        plan.limits,
        peak_bytes=max((entry.memory["peak_bytes"] for entry in entries), default=0),
        inputs_bytes=max((_bytes((*entry.inputs, *entry.outputs)) for entry in entries), default=0),
        communicators=memory.communicators(plan.mesh, groups, window),
        draft=f"params.{plan.model.family.draft_key}.",
    )


def check_before_lowering(plan: Plan, manifest: Manifest) -> None:
    """Refuses weights and pools that exceed a rank's memory, before minutes of lowering.

    Raises:
        SpecError: naming every part of the memory, and the largest settings that fit.
    """
    if not rank_memory(plan, manifest, ()).fits:
        # The advice must leave room for activations, so the largest graphs are partitioned to know them.
        rank_memory(plan, manifest, _largest_partitioned(plan)).check()


def _largest_partitioned(plan: Plan) -> list[GraphEntry]:
    """Entries of the largest bucket of each kind, as far as partitioning tells."""
    entries = []
    for bucket in {bucket.kind: bucket for bucket in sorted(plan.buckets, key=lambda bucket: bucket.tokens)}.values():
        partitioned = partition_bucket(plan, bucket)[1]
        signature, peak = partitioned.signature, {"peak_bytes": partitioned.memory().peak_bytes}
        entries.append(GraphEntry(bucket, signature.inputs, signature.outputs, None, "", "", None, {}, peak, partitioned.collectives, {}))
    return entries


def _rank_tokens(plan: Plan) -> Iterator[int]:
    """Tokens of one rank in each pass over layers: the model's, and the draft head's with one token a row."""
    for bucket in plan.buckets:
        for tokens in (bucket.tokens, *((bucket.batch,) if plan.limits.drafts else ())):
            yield share(bucket, tokens, plan.mesh.axis("tp"))


def _bytes(leaves: tuple[Leaf, ...]) -> int:
    return sum(leaf.aval.nbytes for leaf in leaves)
