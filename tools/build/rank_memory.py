"""The memory plan of one rank of a build, from its plan and the graphs known so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graphs.types import WORLD, Leaf
from ...lowering.artifact.artifact import GraphEntry, Manifest
from ..verify.small_model import share
from . import memory
from .plan import Plan
from .stages import partition_bucket


def rank_memory(plan: Plan, manifest: Manifest, entries: Sequence[GraphEntry]) -> memory.MemoryPlan:
    """The memory plan of one rank; without entries, only its weights, pools and communication."""
    return memory.plan_memory(
        manifest.params,
        manifest.state,
        plan.mesh,
        plan.rules(),
        plan.target,
        plan.limits,
        peak_bytes=max((entry.memory["peak_bytes"] for entry in entries), default=0),
        inputs_bytes=max((_bytes((*entry.inputs, *entry.outputs)) for entry in entries), default=0),
        communicators=memory.communicators(plan.mesh, _groups(entries), _dispatch_window(plan)),
        draft=f"params.{plan.model.family.draft_key}.",
    )


def communicator_bytes(plan: Plan, entries: Sequence[GraphEntry]) -> dict[str, int]:
    """Size of one buffer of each communicator, by the symbol of its group in GE graphs; groups of one rank have none.

    Symbols of the same ranks, such as "tp" and "world" where dp is 1, share a communicator and so have the same size.
    """
    sizes = {symbol: memory.HCCL_BUFFER_BYTES for symbol in sorted(_groups(entries)) if len(plan.mesh.group(symbol, 0)) > 1}
    own = memory.communicators(plan.mesh, (), _dispatch_window(plan))
    return sizes | {communicator.name: communicator.buffer_bytes for communicator in own}


def _groups(entries: Sequence[GraphEntry]) -> set[str]:
    """Groups of collectives besides expert dispatch, which has its own; without entries, those of most models."""
    if not entries:
        return {"tp", WORLD}
    return {group for entry in entries for name, group, _ in entry.collectives if name not in ("moe_dispatch", "moe_combine")}


def _dispatch_window(plan: Plan) -> int:
    """Bytes of the buffer that expert dispatch needs for the most tokens that are dispatched at once; 0 where none are."""
    config, ranks = plan.model.config, plan.mesh.size
    experts = config.num_experts
    most = config.variant.most_dispatched
    passes = [tokens for tokens in _rank_tokens(plan) if tokens <= most or config.variant.dispatches_in_parts]
    tokens = min(max(passes, default=0), most)
    if not (experts and ranks > 1 and tokens):
        return 0
    return memory.dispatch_window_bytes(plan.target, tokens, config.hidden_size, experts, config.num_experts_per_tok, ranks)


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
