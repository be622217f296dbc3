"""Sizes that fit this machine and the model, where nobody says them: requests in flight, decode buckets, context and cached tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...graphs import tree
from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket, Limits
from .planned import Plan
from .targets import MACHINE_BYTES

STATE_SHARE = 2
"""One part in so many of what weights leave of this machine's memory is for state: programs beside us need memory, too, and so do values
of a step and what a build proves."""

TYPICAL = 4096
"""Tokens that requests have room for all at once, if memory allows: more are cached for few requests, up to the whole context for one."""

LEAST = 1024
"""Tokens that each of so many requests has room for; else fewer are in flight."""


def fit_machine(plan: Plan) -> Plan:
    """The plan with the sizes that options leave open, where it runs on this machine and follows no deployment.

    State is memory that is taken as it is written (docs/decisions/049-state-is-resident-where-it-was-written.md), so that a long context
    costs nothing while requests are short; but a server that runs for long writes all of it.
    """
    options = plan.options
    if (
        not plan.target.local
        or plan.deployment
        or not plan.buckets
        or (options.max_model_len and (options.buckets or options.max_num_seqs))
    ):
        return plan
    room = max(MACHINE_BYTES // plan.mesh.size - 2 * plan.params_bytes, 0) // STATE_SHARE
    fixed = options.buckets is not None or options.max_num_seqs is not None
    sizes = [plan.limits.num_request_slots - 1] if fixed else [bucket.batch for bucket in reversed(plan.buckets)]
    requests = next((count for count in sizes if _bytes(plan, count, LEAST) <= room), sizes[-1])
    bounds = [bound for bound in (_bounded(plan), None if _trims(plan) else LEAST) if bound is not None]
    page, longest = plan.limits.page_size, plan.source.max_position_embeddings
    page_bytes = _bytes(plan, 1, page) - _bytes(plan, 1, 0)
    # Pages that memory has room for beside states, without the null page.
    most = (room - _bytes(plan, requests, 0)) // page_bytes if page_bytes else requests * longest
    length = options.max_model_len or max(min(longest, most * page, *bounds), min(longest, LEAST)) // page * page
    tokens = requests * length if options.max_model_len else max(length, requests * min(length, TYPICAL))
    pages = max(min(tokens // page, most), length // page)
    if options.max_total_tokens or options.kv_cache_memory:
        pages = min(requests * length, options.max_total_tokens or requests * length) // page
    limits = _limits(plan, requests, pages, length)
    kept = tuple(bucket for bucket in plan.buckets if not kind_of(bucket).decodes or bucket.batch <= requests)
    return replace(plan, limits=limits, buckets=kept).noted(*_notes(plan, limits, kept, room))


def _limits(plan: Plan, requests: int, pages: int, length: int) -> Limits:
    slots = 1 + requests * plan.limits.slots_per_request
    return replace(plan.limits, num_pages=1 + pages, num_slots=slots, max_model_len=length)


def _bytes(plan: Plan, requests: int, tokens: int) -> int:
    """State of so many requests with so many cached tokens each, the states that are kept for prefixes included."""
    page = plan.limits.page_size
    limits = _limits(plan, requests, -(-requests * tokens // page), page)
    kept = requests if plan.options.checkpoint_slots is None else plan.options.checkpoint_slots
    return replace(plan, limits=replace(limits, num_slots=limits.num_slots + kept)).state_bytes


def _bounded(plan: Plan) -> int | None:
    """Tokens that options leave for one request; None where they say nothing."""
    tokens, nbytes, page = plan.options.max_total_tokens, plan.options.kv_cache_memory, plan.limits.page_size
    if nbytes is None or not (page_bytes := _bytes(plan, 1, page) - _bytes(plan, 1, 0)):
        return tokens
    return max(nbytes // page_bytes - 1, 0) * page


def _trims(plan: Plan) -> bool:
    """Whether attention reads the pages that a request has, not all that it could have: the kernel of keys and values in floats does
    (graphs/ops/paged_attention.py), and compiled graphs of others read the whole table."""
    pools = [aval for _, aval in tree.flatten(plan.model.state(plan.limits, torch.float32)) if aval.axes[0] == "pages"]
    return all(len(aval.shape) == 4 and aval.dtype.is_floating_point for aval in pools)


def _notes(plan: Plan, limits: Limits, buckets: tuple[Bucket, ...], room: int) -> list[str]:
    gib, requests, whole = 2**30, limits.num_request_slots - 1, plan.source.max_position_embeddings
    fitting = f"state may take {room / gib:.1f} GiB, half of what weights leave of this machine's {MACHINE_BYTES / gib:.1f}"
    notes = []
    if plan.options.buckets is None:
        batches = ",".join(map(str, dict.fromkeys(bucket.batch for bucket in buckets if kind_of(bucket).decodes)))
        notes.append(f"{requests} requests in flight, in steps of {batches}: {fitting} (--max-num-seqs, --buckets to change)")
    if plan.options.max_model_len is None:
        own = "the model's own" if limits.max_model_len > whole - limits.page_size else f"of {whole} that the model takes: "
        why = "" if own.startswith("the") else fitting if _trims(plan) else "its attention reads the whole page table at every step"
        notes.append(f"context {limits.max_model_len} tokens, {own}{why} (--max-model-len to change)")
    if limits.num_pages - 1 < requests * limits.pages_per_request:
        tokens = (limits.num_pages - 1) * limits.page_size
        notes.append(f"{tokens} tokens are cached at once: further requests wait, or are preempted (--max-total-tokens to change)")
    return notes
