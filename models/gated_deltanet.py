"""The gated DeltaNet layer: parameters, pools of recurrent state and function."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.types import Aval, Limits, Tree
from . import quant, sequence_parallel
from .batch import Batch
from .params import Param, Parts, Source, norm
from .variant import Variant

PREFILL_CHUNK, LONG_CHUNK = 32, 64
"""Tokens per chunk of the chunked rule: 32 is the smallest chunk whose matrix products take longer than their overhead. Long prompts take
twice that, because the graph unrolls all chunks."""

LONG = 1024
"""From this many tokens on a prefill bucket takes LONG_CHUNK."""

L2_EPS = 1e-6
"""Added to the sum of squares of queries and keys, as in the published implementation."""


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
    return {
        **_projection_params(cfg, dtype, prefix),
        "conv": Param(Aval((channels, taps), dtype, heads), conv),
        "a_log": Param(Aval((Hv,), torch.float32, heads[:1]), Source((prefix + "A_log",), ((Hv,),)), "zeros"),
        "dt_bias": Param(Aval((Hv,), torch.float32, heads[:1]), Source((prefix + "dt_bias",), ((Hv,),)), "ones"),
        "norm": norm(prefix + "norm", Dv, dtype, 0.0),
        "out": Param(Aval((M, Hv * Dv), dtype, (None, "delta_heads")), Source((prefix + "out_proj.weight",), ((M, Hv * Dv),)), role="row"),
    }


def _projection_params(cfg: DeltaNetSizes, dtype: torch.dtype, prefix: str) -> dict[str, Param]:
    """One matrix `qkvzba`; where the formats of its parts differ, `qkvz` and `ba`."""
    whole, heads = ("qkv", "z", "b", "a"), ("delta_heads", None)
    names = ("qkvz", "ba") if cfg.fused_projections else whole
    parts: dict[str, tuple[str, ...]]
    if cfg.variant.formats.agree(f"{prefix}in_proj_{part}.weight" for part in names):
        parts = {"qkvzba": names}
    else:
        parts = {"qkvz": ("qkvz",), "ba": ("ba",)} if cfg.fused_projections else {"qkvz": ("qkv", "z"), "ba": ("b", "a")}
    M, Hk, rows = cfg.hidden_size, cfg.linear_num_key_heads, rows_per_key_head(cfg)
    sizes = {"qkv": rows[:3], "z": rows[3:4], "b": rows[4:5], "a": rows[5:], "qkvz": (sum(rows[:4]),), "ba": (sum(rows[4:]),)}

    def param(names: tuple[str, ...]) -> Param:
        # A checkpoint orders the rows of a tensor by part, then head; one of fused projections by head alone.
        each = [sizes[name] for name in names]
        whole = tuple(size for part in each for size in part)

        def join(*tensors: torch.Tensor) -> torch.Tensor:
            return _group(whole, *(part for tensor, own in zip(tensors, each, strict=True) for part in _by_part(tensor, own)))

        def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parts = iter(_ungroup(x, whole, Hk))
            return tuple(torch.cat([next(parts) for _ in own]) for own in each)

        source = Source(
            tuple(f"{prefix}in_proj_{name}.weight" for name in names),
            tuple((Hk * sum(own), M) for own in each),
            join,
            split,
            tuple((_all_heads(Hk, own) if len(own) > 1 else "delta_heads", None) for own in each),
        )
        return Param(Aval((Hk * sum(whole), M), dtype, heads), source, role="column")

    return {name: param(names) for name, names in parts.items()}


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
    x, in_chunks = sequence_parallel.whole(x, B * Q), batch.state_slots_out.shape[1] != Q
    if batch.sliced is not None:
        # States follow each other in the order of tokens: devices share heads, as elsewhere.
        x = x.index_select(0, batch.sliced.inverse)
    raw, z, *gates = _project(cfg, weights, x, (B, Q), gates_apart=not in_chunks)
    slots = (batch.state_slots_in, batch.state_slots_out, batch.num_computed_tokens, batch.query_lens)
    # The chunked rule computes in float32.
    dtype = torch.float32 if in_chunks else x.dtype
    mixed, conv = ops.causal_conv(raw.reshape(B, Q, -1), weights["conv"], state["conv"], *slots, dtype)
    mixed, decay = mixed.view(B, Q, Hk, -1), (weights["a_log"], weights["dt_bias"])
    if in_chunks:
        chunk = gcd(Q, PREFILL_CHUNK if Q < LONG else LONG_CHUNK)
        out, delta = ops.chunk_gated_delta(mixed, *gates, *decay, state["delta"], *slots, L2_EPS, chunk)
    else:
        q, k, v = _heads(cfg, mixed)
        b, a = (gate.reshape(B, Q, Hv) for gate in gates)
        out, delta = ops.gated_delta(q, k, v.reshape(B, Q, Hv, -1), *ops.delta_gates(a, b, *decay), state["delta"], *slots)
    gated = ops.gated_rms_norm(out.view(B * Q, Hv, -1), z.reshape(B * Q, Hv, -1), weights["norm"], cfg.rms_norm_eps)
    values = gated.view(B * Q, -1)
    values = values if batch.sliced is None else values.index_select(0, batch.sliced.order)
    return sequence_parallel.project(values, weights["out"], "delta_heads"), {"conv": conv, "delta": delta}


def _heads(cfg: DeltaNetSizes, mixed: torch.Tensor) -> Sequence[torch.Tensor]:
    """Queries and keys of unit length, queries scaled, and values: [B, Q, Hk, ...] each, of the outputs of the convolution."""
    (*shape, _), width = mixed.shape, cfg.linear_key_head_dim
    # Kernels that do it at once have a program for each head of each token: few in decode.
    if cfg.variant.split_at_once:
        return [part.view(*shape, -1) for part in ops.delta_heads(mixed.flatten(0, 1), width, L2_EPS, width**-0.5)]
    q, k, v = mixed.split(rows_per_key_head(cfg)[:3], -1)
    return ops.l2_norm(q, L2_EPS, width**-0.5), ops.l2_norm(k, L2_EPS, 1.0), v


def _project(cfg: DeltaNetSizes, weights: Tree, x: torch.Tensor, shape: tuple[int, int], *, gates_apart: bool) -> Sequence[torch.Tensor]:
    """Raw q, k and v of each key head [B, Q, Hk, 2 Dk + r Dv], then z, b and a [B, Q, Hk, ...], of x [B*Q, M]; `shape` is (B, Q).

    Where gates are not apart, b and a are one tensor.
    """
    Hk, rows = cfg.linear_num_key_heads, rows_per_key_head(cfg)
    gates = rows[4:] if gates_apart else (sum(rows[4:]),)
    if "qkvz" in weights:
        wide, narrow = (quant.linear(x, weights[name]).view(*shape, Hk, -1) for name in ("qkvz", "ba"))
        return *wide.split([sum(rows[:3]), rows[3]], -1), *narrow.split(gates, -1)
    joined = quant.linear(x, weights["qkvzba"])
    if not cfg.variant.split_at_once:
        parts: Sequence[torch.Tensor] = joined.view(*shape, Hk, sum(rows)).split([sum(rows[:3]), rows[3], *gates], -1)
        return parts
    split = ops.delta_split(joined.view(-1, Hk, sum(rows)), cfg.linear_key_head_dim, cfg.linear_value_head_dim, rows[-1])
    qkv, z, b, a = (part.view(*shape, Hk, -1) for part in split)
    return (qkv, z, b, a) if gates_apart else (qkv, z, torch.cat((b, a), -1))
