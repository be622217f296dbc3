"""Fits a plan into the memory of a rank: how many pages it has, and how many tokens it sends to the experts' ranks at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...graphs import tree
from ...graphs.errors import SpecError
from ...graphs.steps.table import kind_of
from ...models import expert_placement, programs
from ...models.variant import MOST_DISPATCHED
from . import memory
from .decisions import changed
from .deployments import deployment
from .planned import Plan
from .targets import MACHINE_BYTES

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
    most = max(-(-bucket.tokens // plan.mesh.axis("tp")) for bucket in plan.buckets if not kind_of(bucket).tower)
    if variant.fuses(min(most, MOST_DISPATCHED)):
        # The window of fused experts holds a device's own rows, not those of all others: 82 MiB where a dispatch takes 4.6 GiB.
        return plan
    if not (experts and variant.dispatches_in_parts and variant.most_dispatched == MOST_DISPATCHED and most > FEWER_DISPATCHED):
        return plan
    held, limit = _held_bytes(plan), plan.target.memory_bytes(plan.mesh)
    windows = _window_bytes(plan, config, min(most, MOST_DISPATCHED))
    if held + windows <= limit - limit // FREE_SHARE:
        return plan
    note = (
        f"experts get at most {FEWER_DISPATCHED} tokens of a rank at once, not {MOST_DISPATCHED}: windows of {windows / 2**30:.1f} GiB "
        f"beside {held / 2**30:.1f} GiB of weights, state and runtime leave less than 1/{FREE_SHARE} of {limit / 2**30:.0f} GiB free"
    )
    config = replace(config, variant=replace(variant, most_dispatched=FEWER_DISPATCHED))
    return replace(plan, model=replace(plan.model, config=config)).noted(note)


def _window_bytes(plan: Plan, config: Any, tokens: int) -> int:
    ranks = plan.mesh.size
    experts = expert_placement.count(config)
    window = memory.dispatch_window_bytes(plan.target, tokens, config.hidden_size, experts, config.num_experts_per_tok, ranks)
    return sum(communicator.nbytes for communicator in memory.communicators(plan.mesh, ("tp",), window))


def fit_pool(plan: Plan) -> Plan:
    """The plan with as many pages as fit, never fewer than one request takes; a smaller choice is among its notes.

    Published engines size the pool by the memory that weights leave. A plan takes every request at full length, if that fits, and else
    leaves one part in FREE_SHARE free for activations, which are known when graphs are.
    """
    if not plan.published or (plan.options.max_total_tokens, plan.options.kv_cache_memory) != (None, None):
        return plan
    if deployment(plan.deployment).phase(plan.phase).max_total_tokens is not None:
        return plan
    limits, memory_bytes = plan.limits, plan.target.memory_bytes(plan.mesh)
    pages = fitting_pages(plan)
    if pages >= limits.num_pages - 1:
        return plan
    note = (
        f"differs from the deployment: {pages * limits.page_size} cached tokens a dp group, where all its requests at full length take "
        f"{(limits.num_pages - 1) * limits.page_size}: with those, weights and state would leave less than 1/{FREE_SHARE} of "
        f"{memory_bytes / 2**30:.0f} GiB free"
    )
    return replace(_with_pages(plan, 1 + pages), decided_by=changed(plan.decided_by, "max-total-tokens")).noted(note)


def within_memory(plan: Plan) -> Plan:
    """The plan with the pages of `--kv-cache-memory`, where that was given; the null page is among them. Never more than can be used.

    Raises:
        SpecError: they would not hold one request, the model has no pages, or the number of tokens was asked for, too.
    """
    asked, tokens, limits = plan.options.kv_cache_memory, plan.options.max_total_tokens, plan.limits
    if asked is None:
        return plan
    if tokens is not None:
        both = f"--kv-cache-memory {asked} and --max-total-tokens {tokens}"
        raise SpecError(f"{both} both decide the number of KV pages; legal is one of them")
    page_bytes = _page_bytes(plan)
    if not page_bytes:
        raise SpecError(f"--kv-cache-memory {asked}: {plan.source.name} has no KV pages; legal is a build without it")
    pages, needed = asked // page_bytes, 1 + limits.pages_per_request
    if pages < needed:
        raise SpecError(
            f"--kv-cache-memory {asked} is {pages} pages of {page_bytes} bytes; one request of {limits.max_model_len} tokens takes "
            f"{needed} with the null page, so legal is at least {needed * page_bytes}"
        )
    return _with_pages(plan, min(pages, limits.num_pages))


def fitting_pages(plan: Plan) -> int:
    """Pages of a plan, or fewer where with those a rank would have less than one part in FREE_SHARE of its memory free.

    Never fewer than one request takes.
    """
    limits, memory_bytes = plan.limits, plan.target.memory_bytes(plan.mesh)
    over = _held_bytes(plan) - (memory_bytes - memory_bytes // FREE_SHARE)
    page_bytes = _page_bytes(plan)
    if over <= 0 or not page_bytes:
        return limits.num_pages - 1
    return min(limits.num_pages - 1, max(limits.num_pages - 1 + -over // page_bytes, limits.pages_per_request))


def _page_bytes(plan: Plan) -> int:
    """What one page more takes on a rank, in all layers together."""
    return _with_pages(plan, plan.limits.num_pages + 1).state_bytes - plan.state_bytes


def _with_pages(plan: Plan, pages: int) -> Plan:
    return replace(plan, limits=replace(plan.limits, num_pages=pages))


def _held_bytes(plan: Plan) -> int:
    """What weights, state and the runtime take on a rank."""
    return plan.params_bytes + plan.state_bytes + plan.target.reserved_bytes(plan.mesh)


def check_memory(plan: Plan) -> Plan:
    """Refuses weights and state that exceed this machine's memory; a plan that is not run may have any size."""
    needed = plan.params_bytes + plan.state_bytes
    if plan.target.local and plan.backend != "null" and needed > MACHINE_BYTES:
        raise SpecError(
            f"{plan.source.name} needs {plan.params_bytes / 1e9:,.1f} GB for weights and {plan.state_bytes / 1e9:,.1f} GB for state, this "
            f"machine has {MACHINE_BYTES / 1e9:,.1f} GB; smaller are --max-model-len, --max-num-seqs and --buckets, and --backend null "
            "needs none"
        )
    return plan


def check_split(plan: Plan) -> Plan:
    """Refuses a model whose parameters or pools do not divide by the mesh."""
    rules = plan.rules()
    params = [(name, param.aval) for name, param in tree.flatten(programs.params(plan.model, plan.dtype))]
    for name, aval in (*params, *tree.flatten(plan.model.state(plan.limits, plan.dtype))):
        rules.check(aval, plan.mesh, name)
    return plan
