"""Time of a prefill step, from the configuration of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from .parameters import PlanParameters
from .products import LINEAR_BYTES, NORMAL, Speeds, attention_weights, collective, row_traffic
from .system import System

_PASSES = {True: 14, False: 24}
"""Passes of vector kernels over a layer's activations, in bf16 and in int8."""
_SPLIT_LAYER_S = 0.4e-3

PrefillTime = Callable[[int, int, float, float], float]


def prefill_time(system: System, parameters: PlanParameters) -> PrefillTime:
    """Seconds of a prefill step, as a function of

    - prompts of the group with most of them,
    - prompts of all groups,
    - new tokens of each prompt,
    - tokens of each prompt that are cached already.
    """
    shape, layout, scheme = system.shape, system.layout, system.scheme
    speeds = Speeds(system.machine, parameters)
    full, linear = attention_weights(shape, layout.tp)
    int8 = speeds.rate(scheme.product)
    own = 3.0 * shape.hidden * shape.expert_width
    dispatch, combine = NORMAL[min(NORMAL, key=lambda ranks: abs(ranks - layout.ranks))]
    projections = shape.full_layers * full + shape.dense_layers * 3 * shape.hidden * shape.dense_width / layout.tp
    per_token = 2 * projections / int8 + 2 * shape.linear_layers * linear / speeds.rate(LINEAR_BYTES)
    weights = weights_bytes(system) / speeds.memory
    factor = parameters.prefill_spread if layout.spread and shape.experts else parameters.prefill_split
    per_layer = parameters.prefill_layer_ms * 1e-3 if layout.spread and shape.experts else _SPLIT_LAYER_S
    passes = _PASSES[scheme.product == 2.0] * shape.layers * shape.hidden * 2.0 / speeds.vector
    if layout.shares or (layout.spread and shape.experts):
        # Between experts and attention each rank of a group has a part of the tokens.
        passes /= layout.tp
    reduces = 2 * (shape.dense_layers + (0 if layout.spread else shape.expert_layers))
    gathers = 2 * shape.expert_layers if layout.spread else 0
    attends = system.machine.npu.bf16_ops_per_s * parameters.prefill_attention
    rule = _rule_ops(system) / (system.machine.npu.bf16_ops_per_s * parameters.prefill_rule)

    @cache
    def time(largest: int, prompts: int, new: float, cached: float) -> float:
        tokens, all_tokens = largest * new, prompts * new
        products = tokens * per_token
        seen = cached + new / 2
        attention = largest * _attention_ops(system, new, seen) / attends
        total = products + attention + tokens * (passes + rule)
        if shape.expert_layers:
            total += shape.expert_layers * _expert_time(tokens, all_tokens)
        nbytes = tokens * shape.hidden * 2.0
        total += reduces * float(collective(speeds, nbytes, layout.tp, 2)) + gathers * float(collective(speeds, nbytes, layout.tp, 1))
        return factor * max(total, weights) + shape.layers * per_layer

    def _expert_time(tokens: float, all_tokens: float) -> float:
        rate = speeds.rate(scheme.expert)
        if not layout.spread:
            traffic = float(row_traffic(shape, tokens * shape.per_token, layout.tp)) / speeds.vector
            return 2 * tokens * (shape.per_token * own + 3 * shape.hidden * shape.shared_width) / layout.tp / rate + traffic
        rows = all_tokens * shape.per_token / layout.ranks * (parameters.imbalance if layout.ranks > 1 else 1.0)
        shared = 2 * tokens / layout.tp * 3 * shape.hidden * shape.shared_width / int8
        shared += float(row_traffic(shape, rows, 1)) / speeds.vector
        if layout.ranks == 1:
            return 2 * rows * own / rate + shared
        moved = rows * shape.hidden * (1.0 / dispatch + 2.0 / combine)
        return 2 * rows * own / rate + shared + moved

    return time


def _attention_ops(system: System, new: float, seen: float) -> float:
    """Operations of all layers on one rank for one prompt whose new tokens see so many others on average."""
    shape, tp = system.shape, system.layout.tp
    heads = shape.heads / tp
    if shape.latent is not None:
        latent = shape.latent
        width = latent.nope + latent.rope + latent.value
        if shape.indexer is not None:
            chosen = min(seen, shape.indexer.tokens)
            index = 2.0 * shape.indexer.share * shape.indexer.heads * shape.indexer.dim * seen
            return shape.full_layers * new * (2.0 * heads * width * chosen + index / tp)
        return shape.full_layers * 2.0 * new * heads * width * seen
    return shape.full_layers * 4.0 * new * heads * shape.head_dim * seen


def _rule_ops(system: System) -> float:
    """Operations of the delta rule of all layers on one rank for a token: products within chunks of 64 tokens, and of states with them
    (arXiv:2412.06464)."""
    linear = system.shape.linear
    if linear is None:
        return 0.0
    chunk = 2 * 64 * (linear.key_dim + linear.value_dim) + 3 * linear.key_dim * linear.value_dim
    return system.shape.linear_layers * 2.0 * linear.value_heads / system.layout.tp * chunk


def weights_bytes(system: System) -> float:
    """Bytes of the weights of the layers on one rank; embeddings and heads are not among them."""
    shape, layout, scheme = system.shape, system.layout, system.scheme
    full, linear = attention_weights(shape, layout.tp)
    count = shape.full_layers * full + LINEAR_BYTES / scheme.product * shape.linear_layers * linear
    if shape.latent is not None:
        count += (
            2.0
            / scheme.product
            * shape.full_layers
            * shape.heads
            / layout.tp
            * shape.latent.kv_rank
            * (shape.latent.nope + shape.latent.value)
        )
    count += shape.dense_layers * 3.0 * shape.hidden * shape.dense_width / layout.tp
    return count * scheme.product + shape.expert_layers * expert_layer_bytes(system, scheme.expert, scheme.product)


def expert_layer_bytes(system: System, expert: float, product: float) -> float:
    """Bytes of the experts, router and shared expert of one layer on one rank."""
    shape, layout = system.shape, system.layout
    parts = layout.ranks if layout.spread else layout.tp
    shared = 3.0 * shape.hidden * shape.shared_width / (1 if layout.spread else layout.tp)
    return shape.experts * 3.0 * shape.hidden * shape.expert_width * expert / parts + shared * product + shape.hidden * shape.experts * 2.0
