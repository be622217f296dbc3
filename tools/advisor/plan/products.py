"""Time of matrix products, attention and experts of a step, in seconds, for arrays of batch sizes and contexts."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .parameters import PlanParameters
from .shape import Shape
from .system import PlannedLayout, PlannedMachine

Array = npt.NDArray[np.float64]

VECTOR = 0.6
"""Of HBM bandwidth, what vector kernels reach: assumed."""
BF16_MOST = 0.87
LINEAR_BYTES = 2.0
"""Of a weight of linear attention, which the recipes of ModelSlim leave in bf16."""
PLAIN = 1.25
"""How much faster attention streams keys for one token of a request than for several that are verified: assumed, between no gain and the
2.1 that arXiv:2506.12708 has for plain decoding (84 % of the bandwidth)."""
SKEW = 0.6
"""The i-th most popular expert is chosen in proportion to i^-SKEW: assumed."""


class Speeds:
    """A machine's speeds with the fitted fractions applied: bytes/s and operations/s."""

    def __init__(self, machine: PlannedMachine, p: PlanParameters) -> None:
        self.machine, self.p = machine, p
        self.memory = machine.npu.hbm_bytes_per_s * p.memory
        self.stream = machine.npu.hbm_bytes_per_s * p.stream
        self.vector = machine.npu.hbm_bytes_per_s * VECTOR
        self.int8 = machine.npu.int8_ops_per_s * p.matrix
        self.bf16 = machine.npu.bf16_ops_per_s * min(1.25 * p.matrix, BF16_MOST)
        self.attention = machine.npu.bf16_ops_per_s * p.attention
        self.states = machine.npu.hbm_bytes_per_s * p.state_stream
        self.core = p.core_gb_s * 1e9

    def rate(self, bytes_a_weight: float) -> float:
        """Operations/s of products with weights of so many bytes."""
        return self.bf16 if bytes_a_weight == 2.0 else self.int8


def both(a: Any, b: Any, power: float = 4.0) -> Any:
    """Time of two parts that overlap: a smooth maximum (p-norm)."""
    return (a**power + b**power) ** (1 / power)


def product(speeds: Speeds, rows: Any, weights: float, nbytes: float) -> Any:
    """A product of `rows` rows with so many weights of `nbytes` bytes each."""
    padded = np.ceil(np.asarray(rows, dtype=float) / 16) * 16
    return both(weights * nbytes / speeds.memory, 2 * padded * weights / speeds.rate(nbytes))


def grouped_attention(speeds: Speeds, batch: Any, q: int, context: Any, heads: float, kv_heads: float, dim: int) -> Any:
    """Attention of `q` tokens of each request over `context` cached ones, with so many heads on the rank.

    With fewer requests and key/value heads than cores, each core reads the keys of its own.
    """
    kv_heads, heads = max(kv_heads, 1.0), max(heads, 1.0)
    each = 4.0 * dim * context
    tasks = batch * kv_heads
    shared = tasks * each / (speeds.stream * (PLAIN if q == 1 else 1.0))
    alone = np.where(tasks < speeds.machine.npu.cores, each / speeds.core, 0.0)
    return both(np.maximum(shared, alone), 4 * batch * q * heads * context * dim / speeds.attention)


def latent_attention(speeds: Speeds, batch: Any, q: int, context: Any, heads: float, shape: Shape) -> Any:
    """Absorbed latent attention; its cache is whole on every rank. Sparse attention reads the chosen tokens, after an indexer."""
    latent = shape.latent
    assert latent is not None
    entry = latent.kv_rank + latent.rope
    tokens = batch * q
    if shape.indexer is None:
        read, seen = batch * context * 2.0 * entry, context
        extra: Any = 0.0
    else:
        seen = np.minimum(context, shape.indexer.tokens)
        read = tokens * seen * 2.0 * entry
        keys = batch * context * 2.0 * shape.indexer.dim / speeds.stream
        scores = 2 * tokens * shape.indexer.heads * shape.indexer.dim * context / speeds.attention
        extra = shape.indexer.share * (both(keys, scores) + 300e-6)
    compute = 2 * tokens * heads * seen * (entry + latent.kv_rank) / speeds.attention
    absorbed = heads * latent.kv_rank * (latent.nope + latent.value)
    return both(read / speeds.stream, compute) + product(speeds, tokens, absorbed, 2.0) + extra


def delta_rule(speeds: Speeds, batch: Any, q: int, shape: Shape, tp: int) -> Any:
    """The recurrent rule: reads a state a request and writes one a token."""
    linear = shape.linear
    assert linear is not None
    state = linear.value_heads * linear.key_dim * linear.value_dim * 2.0 / tp
    return batch * (1 + q) * state / speeds.states


def attention_weights(shape: Shape, tp: int) -> tuple[float, float]:
    """Weights of the projections of a softmax layer on a rank, and of a linear one."""
    h = shape.hidden
    if shape.latent is not None:
        latent = shape.latent
        whole = h * latent.q_rank + h * (latent.kv_rank + latent.rope)
        full = whole + shape.heads / tp * (latent.q_rank * (latent.nope + latent.rope) + latent.value * h)
        if shape.indexer is not None:
            indexer = shape.indexer
            full += indexer.share * (latent.q_rank * indexer.heads * indexer.dim + h * (indexer.dim + indexer.heads))
    else:
        heads = shape.heads / tp * (3 if shape.gated else 2)
        full = h * shape.head_dim * (heads + 2 * max(shape.kv_heads / tp, 1.0))
    if shape.linear is None:
        return full, 0.0
    linear = shape.linear
    width = 2 * linear.key_heads * linear.key_dim + linear.value_heads * (3 * linear.value_dim + 2)
    return full, h * width / tp


@lru_cache(maxsize=32)
def _popularity(experts: int) -> Array:
    weights = np.arange(1, experts + 1, dtype=float) ** -SKEW
    result: Array = weights / weights.sum()
    return result


def distinct_experts(tokens: Any, experts: int, per_token: int) -> Array:
    """Experts that so many tokens choose at least once, on average."""
    chance = np.minimum(_popularity(experts) * per_token, 1.0 - 1e-12)
    counts = np.atleast_1d(np.asarray(tokens, dtype=float))
    result: Array = (1 - np.exp(counts[..., None] * np.log1p(-chance))).sum(-1)
    return result


def experts(speeds: Speeds, shape: Shape, layout: PlannedLayout, tokens: Any, nbytes: float, shared_bytes: float) -> Any:
    """The experts of a layer, router and shared expert included.

    Args:
        tokens: of one group.
        nbytes, shared_bytes: of a weight of an expert, and of a shared one.
    """
    own = 3.0 * shape.hidden * shape.expert_width
    parts = layout.ranks if layout.spread else layout.tp
    total = tokens * layout.dp if layout.spread else tokens
    read = distinct_experts(total, shape.experts, shape.per_token).reshape(np.shape(total))
    per_rank = tokens / layout.tp if layout.spread else tokens
    imbalance = speeds.p.imbalance if layout.spread and layout.ranks > 1 else 1.0
    choices = per_rank * shape.per_token * imbalance
    stream = read * own * nbytes / parts / speeds.memory
    share = 1 if layout.spread else layout.tp
    # Rows of an expert are padded to 16.
    padded = choices + 8.0 * read / (layout.ranks if layout.spread else 1)
    compute = 2 * padded * own / share / speeds.rate(nbytes)
    moved = row_traffic(shape, choices, share) / speeds.vector
    time = both(stream, compute, 2.0) + moved + product(speeds, per_rank, shape.hidden * shape.experts, 2.0)
    if shape.shared_width:
        time = time + product(speeds, per_rank, 3.0 * shape.hidden * shape.shared_width / share, shared_bytes)
    return time


def row_traffic(shape: Shape, rows: Any, share: int) -> Any:
    """Bytes of rows that are sorted by expert, activated and put back; `share` ranks have a part of each expert."""
    return rows * 6 * (shape.hidden + shape.expert_width / share) * 2.0


NORMAL = {8: (146e9, 125e9), 16: (107e9, 103e9), 32: (102e9, 95e9), 64: (81e9, 91e9), 128: (57e9, 81e9)}
"""Bytes/s of dispatch and combine of many tokens by ranks: sgl-project/sgl-kernel-npu README, DeepEP-Ascend performance."""


def exchange(speeds: Speeds, shape: Shape, layout: PlannedLayout, tokens: Any) -> Any:
    """Dispatch and combine of a decode step.

    Fixed part and slope go through 137 us at 128 tokens a rank, 7168 wide, eight experts each, eight ranks, the mean of dispatch and
    combine in that table, and 8 us more for each doubling of ranks.
    """
    if layout.ranks == 1:
        return 0.0 * np.asarray(tokens, dtype=float)
    p = speeds.p
    rows = tokens / layout.tp * p.imbalance
    slope = (137.0 - p.exchange_us) / 128 * shape.hidden * shape.per_token / (7168 * 8)
    if layout.ranks > speeds.machine.npu.npus_per_node and speeds.machine.npu.node_link_bytes_per_s < speeds.machine.npu.link_bytes_per_s:
        slope *= speeds.machine.npu.link_bytes_per_s / speeds.machine.npu.node_link_bytes_per_s / 2
    return 2e-6 * (p.exchange_us + 8 * max(0.0, math.log2(layout.ranks / 8)) + rows * slope)


def collective(speeds: Speeds, nbytes: Any, ranks: int, steps: int) -> Any:
    """A collective of `steps` passes (2 of an all-reduce) over a group of `ranks`."""
    if ranks == 1:
        return 0.0 * np.asarray(nbytes, dtype=float)
    machine = speeds.machine
    link = machine.npu.link_bytes_per_s if ranks <= machine.npu.npus_per_node else machine.npu.node_link_bytes_per_s
    fixed = speeds.p.collective_us * 1e-6 + machine.hop_s * math.log2(ranks)
    return fixed + steps * (ranks - 1) / ranks * nbytes / (link * speeds.p.link)
