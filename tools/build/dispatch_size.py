"""How many tokens a rank sends to the experts' ranks at once: as many as its memory has exchange windows for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...models.variant import MOST_DISPATCHED
from . import memory

if TYPE_CHECKING:
    from .plan import Plan

FEWER_DISPATCHED = 256
"""Tokens of one dispatch where windows for `MOST_DISPATCHED` are too large: half the window, and the other algorithm takes as many."""

FREE_SHARE = 8
"""One part in so many of a rank's memory stays free for activations, which are known when graphs are: at most 7 of 64 GiB in a published
deployment."""


def fit_dispatch(plan: Plan) -> Plan:
    """The plan with the largest dispatches whose windows fit beside weights and state; a smaller choice is among its notes.

    Each dispatch reads the experts' weights again, so prefill is faster in few large parts.
    """
    config = plan.model.config
    experts, variant = config.num_experts, config.variant
    most = max(-(-bucket.tokens // plan.mesh.axis("tp")) for bucket in plan.buckets)
    if not (experts and variant.dispatches_in_parts and variant.most_dispatched == MOST_DISPATCHED and most > FEWER_DISPATCHED):
        return plan
    held = plan.params_bytes + plan.state_bytes + plan.target.reserved_bytes(plan.mesh)
    limit = plan.target.memory_bytes(plan.mesh)
    windows = _window_bytes(plan, config, min(most, MOST_DISPATCHED))
    if held + windows <= limit - limit // FREE_SHARE:
        return plan
    note = (
        f"experts get at most {FEWER_DISPATCHED} tokens of a rank at once, not {MOST_DISPATCHED}: windows of {windows / 2**30:.1f} GiB "
        f"beside {held / 2**30:.1f} GiB of weights, state and runtime leave less than 1/{FREE_SHARE} of {limit / 2**30:.0f} GiB free"
    )
    config = replace(config, variant=replace(variant, most_dispatched=FEWER_DISPATCHED))
    return replace(plan, model=replace(plan.model, config=config), notes=(*plan.notes, note))


def _window_bytes(plan: Plan, config: Any, tokens: int) -> int:
    ranks = plan.mesh.size
    window = memory.dispatch_window_bytes(plan.target, tokens, config.hidden_size, config.num_experts, config.num_experts_per_tok, ranks)
    return sum(communicator.nbytes for communicator in memory.communicators(plan.mesh, ("tp",), window))
