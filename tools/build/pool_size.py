"""How many pages a rank has: those of a share of memory that was asked for, or as many as fit beside weights and state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...graphs.errors import SpecError
from .decisions import changed
from .deployments import deployment
from .dispatch_size import FREE_SHARE

if TYPE_CHECKING:
    from .plan import Plan


def fit_pool(plan: Plan) -> Plan:
    """The plan with as many pages as fit, never fewer than one request takes; a smaller choice is among its notes.

    Published engines size the pool by the memory that weights leave. A plan takes every request at full length, if that fits, and else
    leaves one part in FREE_SHARE free for activations, which are known when graphs are.
    """
    if not plan.published or plan.max_total_tokens is not None or plan.kv_cache_memory is not None:
        return plan
    if deployment(plan.deployment).phase(plan.phase).max_total_tokens is not None:
        return plan
    limits, memory = plan.limits, plan.target.memory_bytes(plan.mesh)
    pages = fitting_pages(plan)
    if pages >= limits.num_pages - 1:
        return plan
    note = (
        f"differs from the deployment: {pages * limits.page_size} cached tokens a dp group, where all its requests at full length take "
        f"{(limits.num_pages - 1) * limits.page_size}: with those, weights and state would leave less than 1/{FREE_SHARE} of "
        f"{memory / 2**30:.0f} GiB free"
    )
    return replace(_with_pages(plan, 1 + pages), notes=(*plan.notes, note), decided_by=changed(plan.decided_by, "max-total-tokens"))


def within_memory(plan: Plan) -> Plan:
    """The plan with the pages of `--kv-cache-memory`, where that was given; the null page is among them. Never more than can be used.

    Raises:
        SpecError: they would not hold one request, the model has no pages, or the number of tokens was asked for, too.
    """
    asked, limits = plan.kv_cache_memory, plan.limits
    if asked is None:
        return plan
    if plan.max_total_tokens is not None:
        both = f"--kv-cache-memory {asked} and --max-total-tokens {plan.max_total_tokens}"
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
    limits, memory = plan.limits, plan.target.memory_bytes(plan.mesh)
    held = plan.params_bytes + plan.state_bytes + plan.target.reserved_bytes(plan.mesh)
    over = held - (memory - memory // FREE_SHARE)
    page_bytes = _page_bytes(plan)
    if over <= 0 or not page_bytes:
        return limits.num_pages - 1
    return min(limits.num_pages - 1, max(limits.num_pages - 1 + -over // page_bytes, limits.pages_per_request))


def _page_bytes(plan: Plan) -> int:
    """What one page more takes on a rank, in all layers together."""
    return _with_pages(plan, plan.limits.num_pages + 1).state_bytes - plan.state_bytes


def _with_pages(plan: Plan, pages: int) -> Plan:
    return replace(plan, limits=replace(plan.limits, num_pages=pages))
