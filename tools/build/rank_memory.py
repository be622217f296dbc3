"""What one rank of a build holds, from its plan and as many of its graphs as are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graphs.types import Leaf
from ...lowering.artifact.artifact import GraphEntry, Manifest
from ..verify.small_model import share
from . import memory
from .plan import Plan
from .stages import partition_bucket


def rank_memory(plan: Plan, manifest: Manifest, entries: Sequence[GraphEntry]) -> memory.MemoryPlan:
    """The memory plan of one rank; without entries, of its weights, pools and communication alone."""
    config, ranks = plan.model.config, plan.mesh.size
    experts = getattr(config, "num_experts", 0)
    sent = max((tokens for tokens in _tokens_of_a_rank(plan) if tokens <= config.variant.most_dispatched), default=0)
    window = 0
    if experts and ranks > 1 and sent:
        window = memory.dispatch_window_bytes(plan.target, sent, config.hidden_size, experts, config.num_experts_per_tok, ranks)
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
    """Refuses weights and pools that do not fit, with the largest settings that do.

    Raises:
        SpecError: naming every part of the memory.
    """
    if not rank_memory(plan, manifest, ()).fits:
        # What fits beside the activations is known once the largest graphs are.
        rank_memory(plan, manifest, _largest_partitioned(plan)).check()


def _largest_partitioned(plan: Plan) -> list[GraphEntry]:
    """The largest bucket of each kind, as far as it is known before it is lowered."""
    entries = []
    for bucket in {bucket.kind: bucket for bucket in sorted(plan.buckets, key=lambda bucket: bucket.tokens)}.values():
        partitioned = partition_bucket(plan, bucket)[1]
        signature, peak = partitioned.signature, {"peak_bytes": partitioned.memory().peak_bytes}
        entries.append(GraphEntry(bucket, signature.inputs, signature.outputs, None, "", "", None, {}, peak, partitioned.collectives, {}))
    return entries


def _tokens_of_a_rank(plan: Plan) -> Iterator[int]:
    """Tokens of one rank in every pass over layers: the model's, and the draft head's over one token a row."""
    for bucket in plan.buckets:
        for tokens in (bucket.tokens, *((bucket.batch,) if plan.limits.drafts else ())):
            yield share(bucket, tokens, plan.mesh.axis("tp"))


def _bytes(leaves: tuple[Leaf, ...]) -> int:
    return sum(leaf.aval.nbytes for leaf in leaves)
