"""Time of a decode step by cause, from the configuration of a model.

The formulas and their fixed constants come from public measurements; what is fitted is in `parameters.json`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .parameters import PlanParameters
from .products import (
    LINEAR_BYTES,
    Array,
    Speeds,
    attention_weights,
    collective,
    delta_rule,
    exchange,
    experts,
    grouped_attention,
    latent_attention,
    product,
)
from .system import System

CAUSES = ("attention", "products", "experts", "exchange", "collectives", "head", "drafts", "launches", "host")
"""Parts of a step. "products" are dense feed-forward layers; projections are part of "attention"."""

KERNELS = {"grouped": 9, "latent": 7, "linear": 14, "dense": 5, "spread": 12, "shared": 4, "split": 20}
"""Kernels of a layer by kind."""

_HOST_PLAIN_MS = 1.0
"""Host work of a step that verifies nothing: assumed."""
_EAGLE_KERNELS = 18


def decode_parts(system: System, parameters: PlanParameters, batch: Any, context: Any) -> dict[str, Array]:
    """Seconds of a decode step by cause.

    Args:
        batch: rows of each group, padding included; broadcasts with `context`.
        context: cached tokens of a request on average.
    """
    speeds = Speeds(system.machine, parameters)
    batch, context = np.broadcast_arrays(np.asarray(batch, dtype=float), np.asarray(context, dtype=float))
    parts = _layers(system, speeds, batch, system.candidates, context)
    parts["head"] = _head(system, speeds, batch * system.candidates)
    drafts = [_draft(system, speeds, batch, system.candidates if i == 0 else 1, context) for i in range(system.drafts)]
    parts["drafts"] = sum(drafts, np.zeros_like(batch))
    host = parameters.host_ms if system.drafts else _HOST_PLAIN_MS
    parts["host"] = np.full_like(batch, 1e-3 * (host + (parameters.groups_ms if system.layout.dp > 1 else 0.0)))
    return {cause: parts[cause] for cause in CAUSES}


def decode_seconds(system: System, parameters: PlanParameters, batch: Any, context: Any) -> Array:
    """Seconds of a decode step; arguments as of `decode_parts`."""
    total: Array = np.sum(np.stack(list(decode_parts(system, parameters, batch, context).values())), axis=0)
    return total


def _layers(system: System, speeds: Speeds, batch: Array, q: int, context: Array) -> dict[str, Array]:
    shape, layout, scheme = system.shape, system.layout, system.scheme
    tokens, zero = batch * q, np.zeros_like(batch)
    full, linear = attention_weights(shape, layout.tp)
    heads = shape.heads / layout.tp
    attention = shape.full_layers * product(speeds, tokens, full, scheme.product)
    if shape.latent is not None:
        attention = attention + shape.full_layers * latent_attention(speeds, batch, q, context, heads, shape)
    else:
        kv_heads = shape.kv_heads / layout.tp
        attention = attention + shape.full_layers * grouped_attention(speeds, batch, q, context, heads, kv_heads, shape.head_dim)
    if shape.linear_layers:
        rule = product(speeds, tokens, linear, LINEAR_BYTES) + delta_rule(speeds, batch, q, shape, layout.tp)
        attention = attention + shape.linear_layers * rule
    dense = shape.dense_layers * product(speeds, tokens, 3.0 * shape.hidden * shape.dense_width / layout.tp, scheme.product)
    spread, sent = zero, zero
    if shape.expert_layers:
        spread = shape.expert_layers * experts(speeds, shape, layout, tokens, scheme.expert, scheme.product)
        if layout.spread:
            sent = shape.expert_layers * exchange(speeds, shape, layout, tokens)
    reduces = 2 * (shape.dense_layers + (0 if layout.spread else shape.expert_layers))
    gathers = 2 * shape.expert_layers if layout.spread else 0
    nbytes = tokens * shape.hidden * 2.0
    moved = reduces * collective(speeds, nbytes, layout.tp, 2) + gathers * collective(speeds, nbytes, layout.tp, 1)
    launches = zero + kernels(system) * speeds.p.launch_us * 1e-6
    return {
        "attention": attention,
        "products": dense + zero,
        "experts": spread,
        "exchange": sent,
        "collectives": moved,
        "launches": launches,
    }


def kernels(system: System) -> int:
    """Kernels that the layers of a step start."""
    shape, layout = system.shape, system.layout
    softmax = KERNELS["latent" if shape.latent else "grouped"]
    per_expert = KERNELS["spread" if layout.spread else "split"] + (KERNELS["shared"] if shape.shared_width else 0)
    count = shape.full_layers * softmax + shape.linear_layers * KERNELS["linear"]
    return count + shape.dense_layers * KERNELS["dense"] + shape.expert_layers * per_expert


def _head(system: System, speeds: Speeds, tokens: Array, vocab: int = 0) -> Array:
    """LM head in bf16, and four passes of its float32 logits for sampling."""
    shape, layout = system.shape, system.layout
    vocab = vocab or shape.vocab
    ranks = layout.tp if layout.head_in_group else layout.ranks
    rows = tokens if layout.head_in_group else tokens * layout.dp
    time: Array = product(speeds, rows, shape.hidden * vocab / ranks, 2.0) + 16.0 * tokens * vocab / speeds.vector
    return time


def _draft(system: System, speeds: Speeds, batch: Array, q: int, context: Array) -> Array:
    """One forward of the draft head."""
    shape, draft, layout = system.shape, system.shape.draft, system.layout
    start = 1e-3 * speeds.p.draft_ms
    if draft is None:
        return np.full_like(batch, start)
    if draft.kind == "mtp":
        layer = replace(
            shape,
            full_layers=1,
            linear_layers=0,
            dense_layers=0 if shape.experts else 1,
            expert_layers=1 if shape.experts else 0,
        )
        scheme = replace(system.scheme, product=system.scheme.draft, expert=system.scheme.draft)
        one = replace(system, shape=layer, scheme=scheme)
        time = sum(_layers(one, speeds, batch, q, context).values(), np.zeros_like(batch))
        joined = product(speeds, batch * q, 2.0 * shape.hidden * shape.hidden / layout.tp, scheme.product)
        whole: Array = time + joined + _head(system, speeds, batch) + start
        return whole
    tokens, h = batch * q, shape.hidden
    heads, kv_heads = draft.heads / layout.tp, draft.kv_heads / layout.tp
    projections = draft.head_dim * (heads * 3 + 4 * max(kv_heads, 1.0)) * h
    time = product(speeds, tokens, projections + 3.0 * h * (draft.width + h) / layout.tp, 2.0)
    time = time + grouped_attention(speeds, batch, q, context, heads, kv_heads, draft.head_dim)
    time = time + 2 * collective(speeds, tokens * h * 2.0, layout.tp, 2) + _EAGLE_KERNELS * speeds.p.launch_us * 1e-6
    total: Array = time + _head(system, speeds, batch, draft.vocab) + start
    return total
