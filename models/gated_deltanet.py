"""The gated DeltaNet layer: parameters, pools of recurrent state and function."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.types import Aval, Limits, Tree
from . import sequence_parallel
from .batch import Batch
from .params import Param, Parts, Source, norm
from .variant import Variant

PREFILL_CHUNK, LONG_CHUNK = 32, 64
"""Tokens per chunk of the chunked rule: 32 is the smallest chunk whose matrix products take longer than their overhead. Long prompts take
twice that, because the graph unrolls all chunks."""

LONG = 1024
"""From this many tokens on a prefill bucket takes LONG_CHUNK."""


class DeltaNetSizes(Protocol):
    """Fields of a model's configuration that the layer reads.

    With `fused_projections` checkpoints hold `in_proj_qkvz` and `in_proj_ba`, whose rows are ordered by key head; else `in_proj_qkv`, whose
    rows are all heads' queries, then keys, then values, and `in_proj_z`, `in_proj_b` and `in_proj_a`.
    """

    @property
    def hidden_size(self) -> int: ...
    @property
    def linear_num_key_heads(self) -> int: ...
    @property
    def linear_num_value_heads(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def fused_projections(self) -> bool: ...
    @property
    def variant(self) -> Variant: ...


def rows_per_key_head(cfg: DeltaNetSizes) -> tuple[int, int, int, int, int, int]:
    """Projection rows that belong to one key head: q, k, v, z, b, a."""
    heads = cfg.linear_num_value_heads // cfg.linear_num_key_heads
    values = heads * cfg.linear_value_head_dim
    return cfg.linear_key_head_dim, cfg.linear_key_head_dim, values, values, heads, heads


def params(cfg: DeltaNetSizes, dtype: torch.dtype, prefix: str) -> dict[str, Param]:
    """Parameters of one layer; `prefix` begins their names in a checkpoint. Rows of `qkvzba` and `conv` are ordered by key head."""
    M, Hk, Hv, Dv = cfg.hidden_size, cfg.linear_num_key_heads, cfg.linear_num_value_heads, cfg.linear_value_head_dim
    rows, taps, heads = rows_per_key_head(cfg)[:3], cfg.linear_conv_kernel_dim, ("delta_heads", None)
    channels = Hk * sum(rows)
    conv = Source(
        (prefix + "conv1d.weight",),
        ((channels, 1, taps),),
        lambda w: _group(rows, *_by_part(w.flatten(1), rows)),
        lambda x: (torch.cat(_ungroup(x, rows, Hk)).unsqueeze(1),),
        ((_all_heads(Hk, rows), None, None),),
    )
    projections = (_fused_projections if cfg.fused_projections else _projections)(cfg, prefix)
    return {
        "qkvzba": Param(Aval((Hk * sum(rows_per_key_head(cfg)), M), dtype, heads), projections),
        "conv": Param(Aval((channels, taps), dtype, heads), conv),
        "a_log": Param(Aval((Hv,), torch.float32, heads[:1]), Source((prefix + "A_log",), ((Hv,),)), "zeros"),
        "dt_bias": Param(Aval((Hv,), torch.float32, heads[:1]), Source((prefix + "dt_bias",), ((Hv,),)), "ones"),
        "norm": norm(prefix + "norm", Dv, dtype, 0.0),
        "out": Param(Aval((M, Hv * Dv), dtype, (None, "delta_heads")), Source((prefix + "out_proj.weight",), ((M, Hv * Dv),))),
    }


def _projections(cfg: DeltaNetSizes, prefix: str) -> Source:
    """Source of `qkvzba` in a checkpoint that orders rows by part, then head."""
    M, Hk, rows, heads = cfg.hidden_size, cfg.linear_num_key_heads, rows_per_key_head(cfg), ("delta_heads", None)

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, *others = _ungroup(x, rows, Hk)
        return torch.cat((q, k, v)), *others

    return Source(
        tuple(f"{prefix}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        tuple((Hk * size, M) for size in (sum(rows[:3]), *rows[3:])),
        lambda qkv, *others: _group(rows, *_by_part(qkv, rows[:3]), *others),
        split,
        ((_all_heads(Hk, rows[:3]), None), heads, heads, heads),
    )


def _fused_projections(cfg: DeltaNetSizes, prefix: str) -> Source:
    """Source of `qkvzba` in a checkpoint that orders rows by key head, in two matrices."""
    M, Hk, rows = cfg.hidden_size, cfg.linear_num_key_heads, rows_per_key_head(cfg)
    sizes = (sum(rows[:4]), sum(rows[4:]))
    return Source(
        tuple(f"{prefix}in_proj_{parts}.weight" for parts in ("qkvz", "ba")),
        tuple((Hk * size, M) for size in sizes),
        lambda qkvz, ba: _group(sizes, qkvz, ba),
        lambda x: _ungroup(x, sizes, Hk),
        (("delta_heads", None),) * 2,
    )


def _all_heads(key_heads: int, rows: tuple[int, ...]) -> Parts:
    """A dimension of parts, each with so many rows of every key head."""
    return Parts("delta_heads", tuple(key_heads * size for size in rows))


def _group(sizes: tuple[int, ...], *parts: torch.Tensor) -> torch.Tensor:
    """Rows ordered by part, then key head -> by key head, then part. A rank has some heads; each has `sizes` rows of the parts."""
    return torch.cat([part.reshape(-1, size, part.shape[-1]) for size, part in zip(sizes, parts, strict=True)], 1).flatten(0, 1)


def _ungroup(x: torch.Tensor, sizes: tuple[int, ...], key_heads: int) -> tuple[torch.Tensor, ...]:
    """The inverse of `_group` for all heads."""
    return tuple(part.reshape(-1, x.shape[-1]) for part in x.view(key_heads, -1, x.shape[-1]).split(sizes, 1))


def _by_part(x: torch.Tensor, rows: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Takes rows apart that are ordered by part: each part has so many of every key head."""
    key_heads = len(x) // sum(rows)
    return tuple(x.split([key_heads * size for size in rows]))


def state(cfg: DeltaNetSizes, limits: Limits, dtype: torch.dtype) -> dict[str, Aval]:
    """Slot pools of one layer: `conv` [S, taps-1, C] raw inputs, or [S, taps-1 + k, C] (`Variant.one_window`), `delta` [S, Hv, Dv, Dk]."""
    channels = cfg.linear_num_key_heads * sum(rows_per_key_head(cfg)[:3])
    matrix = (limits.num_slots, cfg.linear_num_value_heads, cfg.linear_value_head_dim, cfg.linear_key_head_dim)
    slots, inputs = "slots", cfg.linear_conv_kernel_dim - 1
    if cfg.variant.one_window and limits.slots_per_request > 1:
        slots, inputs = "first_slots", inputs + limits.slots_per_request - 1
    return {
        "conv": Aval((limits.num_slots, inputs, channels), dtype, (slots, None, "delta_heads")),
        "delta": Aval(matrix, cfg.variant.recurrent, ("slots", "delta_heads", None, None)),
    }


def apply(cfg: DeltaNetSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> tuple[torch.Tensor, Tree]:
    """Causal convolution, gated delta rule, gated norm (arXiv:2412.06464).

    Args:
        x: [T, M] normalised input, padding rows included, laid out as the residual stream (sequence_parallel.py).

    Returns:
        the layer's output before the residual add, shaped and laid out like x, and the new state.
    """
    B, Q, Hk, Hv = batch.size, batch.q_len, cfg.linear_num_key_heads, cfg.linear_num_value_heads
    rows, x = rows_per_key_head(cfg), sequence_parallel.whole(x, B * Q)
    raw, z, b, a = _project(cfg, weights["qkvzba"], x, (B, Q))
    slots = (batch.state_slots_in, batch.state_slots_out, batch.num_computed_tokens, batch.query_lens)
    mixed, conv = ops.causal_conv(raw.reshape(B, Q, -1), weights["conv"], state["conv"], *slots)
    q, k, v = mixed.view(B, Q, Hk, -1).split(rows[:3], -1)
    q = ops.l2_norm(q, 1e-6, cfg.linear_key_head_dim**-0.5)
    k = ops.l2_norm(k, 1e-6, 1.0)
    g, beta = ops.delta_gates(a.reshape(B, Q, Hv), b.reshape(B, Q, Hv), weights["a_log"], weights["dt_bias"])
    v = v.reshape(B, Q, Hv, -1)
    chunk = 0 if batch.state_slots_out.shape[1] == Q else gcd(Q, PREFILL_CHUNK if Q < LONG else LONG_CHUNK)
    out, delta = ops.gated_delta(q, k, v, g, beta, state["delta"], *slots, chunk)
    gated = ops.gated_rms_norm(out.view(B * Q, Hv, -1), z.reshape(B * Q, Hv, -1), weights["norm"], cfg.rms_norm_eps)
    return sequence_parallel.project(gated.view(B * Q, -1), weights["out"]), {"conv": conv, "delta": delta}


def _project(cfg: DeltaNetSizes, weight: torch.Tensor, x: torch.Tensor, shape: tuple[int, int]) -> Sequence[torch.Tensor]:
    """Raw q, k and v of each key head [B, Q, Hk, 2 Dk + r Dv], then z, b and a [B, Q, Hk, ...], of x [B*Q, M]; `shape` is (B, Q)."""
    Hk, rows = cfg.linear_num_key_heads, rows_per_key_head(cfg)
    sizes = [sum(rows[:3]), *rows[3:]]
    if not cfg.variant.projections_apart:
        joined: Sequence[torch.Tensor] = ops.linear(x, weight).view(*shape, Hk, sum(rows)).split(sizes, -1)
        return joined
    parts = weight.view(Hk, sum(rows), -1).split(sizes, 1)
    return [ops.linear(x, part.reshape(Hk * size, -1)).view(*shape, Hk, size) for part, size in zip(parts, sizes, strict=True)]
