"""Grouped-query attention, with normalised heads or not, gated or not: parameters, paged key-value pools and functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..graphs import ops
from ..graphs.spmd.layout import constrain
from ..graphs.types import Aval, Limits, Tree
from . import norms, quant, sequence_parallel
from .batch import Batch, Queries
from .params import Members, Param, Repeated, Source, norm_init
from .quant.formats import FLOAT, INT8_STATIC
from .rotary import Rotary
from .variant import Variant

EACH, ALL, NONE = "each", "all", "none"
"""Norms of query and key heads."""


class AttentionSizes(Protocol):
    """Fields of a model's configuration that the layer reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rotary_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def norm_offset(self) -> float: ...
    @property
    def attn_output_gate(self) -> bool: ...
    @property
    def variant(self) -> Variant: ...


class PlainHeads:
    """What configurations derive from their heads: the norms, gates and shares of most models. One that differs has its own."""

    num_attention_heads: int
    rotary: Rotary

    @property
    def norm_offset(self) -> float:
        return 0.0

    @property
    def attn_output_gate(self) -> bool:
        return False

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head."""
        return self.rotary.dim

    @property
    def split_heads(self) -> Mapping[str, int]:
        """Numbers of heads that the ranks of a group share."""
        return {"num_attention_heads": self.num_attention_heads}


def uneven(cfg: AttentionSizes) -> list[tuple[int, str]]:
    """(remainder, rule) of numbers of heads that do not divide by each other; padded ones (head_padding.py) do."""
    queries, keys, heads = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.num_key_value_heads * cfg.variant.kv_repeat
    return [
        (queries % keys, "num_attention_heads must be a multiple of num_key_value_heads"),
        (
            0 if cfg.variant.heads else queries % heads,
            f"num_attention_heads must be a multiple of {heads} key-value heads, copies included",
        ),
    ]


def params(
    cfg: AttentionSizes,
    dtype: torch.dtype,
    prefix: str,
    *,
    joined: bool = True,
    width: int | None = None,
    head_norms: str = EACH,
    biased: bool = False,
) -> dict[str, Tree]:
    """Parameters of one layer; `prefix` begins their names in a checkpoint.

    The channels of a query or key head are in the order of `rotated_order`; in that of a checkpoint where `attention_heads` rotates them.

    Args:
        joined: one matrix `qkv` for `apply`, whose rows are, by key-value head: its query heads, their gates if it has any, its keys, its
            values; with `Variant.split_at_once` its query heads each before its gate. Else `q`, by query head its query and its gate, for
            `attend`; and `kv`, by key-value head its keys and its values, for `write_kv`.
        width: of the layer's input; that of its output by default.
        head_norms: of queries and keys: `EACH` head by `q_norm` and `k_norm` [D], `ALL` heads together by `q_norms` [H, D] and `k_norms`
            [G, D], only with `joined`, or `NONE`.
        biased: whether the projections of queries, keys and values add biases.

    A layer whose cache is int8 by scales of the checkpoint has these, `k_scale` and `v_scale` [G, D].
    """
    M, H, D = cfg.hidden_size, cfg.num_attention_heads, cfg.head_dim
    order = list(range(D)) if joined and _at_once(cfg) else rotated_order(D, cfg.rotary_dim)
    inverse = [order.index(i) for i in range(D)]
    matrices = (_joined if joined else _apart)(cfg, dtype, prefix, width or M, order, inverse)
    matrices = {name: replace(matrix, biased=biased) for name, matrix in matrices.items()}

    def norm(name: str) -> Param:
        source = Source((f"{prefix}{name}.weight",), ((D,),), lambda x: x[order], lambda x: (x[inverse],))
        return Param(Aval((D,), dtype), source, norm_init(cfg.norm_offset), role="norm")

    return {
        **matrices,
        **({name: norm(name) for name in ("q_norm", "k_norm")} if head_norms == EACH else {}),
        **(_norms_of_all(cfg, dtype, prefix, order, inverse) if head_norms == ALL else {}),
        **(_cache_scales(cfg, prefix, order, inverse) if cfg.variant.formats.of_cache(prefix.removesuffix(".")) == INT8_STATIC else {}),
        "out": Param(Aval((M, H * D), dtype, (None, "q_heads")), Source((prefix + "o_proj.weight",), ((M, H * D),)), role="row"),
    }


def _cache_scales(cfg: AttentionSizes, prefix: str, order: list[int], inverse: list[int]) -> dict[str, Param]:
    """Scales of cached keys and values, a number for each head and channel: keys in the order of their channels here."""
    same = list(range(cfg.head_dim))
    keys = _by_channel(cfg, f"{prefix}k_proj.kv_cache_scale", torch.float32, order, inverse, "cache_scale")
    return {"k_scale": keys, "v_scale": _by_channel(cfg, f"{prefix}v_proj.kv_cache_scale", torch.float32, same, same, "cache_scale")}


def _norms_of_all(cfg: AttentionSizes, dtype: torch.dtype, prefix: str, order: list[int], inverse: list[int]) -> dict[str, Param]:
    """Weights of the norms of all query heads and of all key heads, by head."""
    H, D = cfg.num_attention_heads, cfg.head_dim
    source = Source(
        (f"{prefix}q_norm.weight",),
        ((H * D,),),
        lambda x: x.reshape(-1, D)[:, order],
        lambda x: (x[:, inverse].flatten(),),
        (("q_heads",),),
    )
    init = norm_init(cfg.norm_offset)
    keys = _by_channel(cfg, f"{prefix}k_norm.weight", dtype, order, inverse, init)
    return {"q_norms": Param(Aval((H, D), dtype, ("q_heads", None)), source, init), "k_norms": keys}


def _by_channel(cfg: AttentionSizes, name: str, dtype: torch.dtype, there: list[int], back: list[int], init: str) -> Param:
    """[G, D], copies included: a number for each channel of each key-value head."""
    G, D, copies = cfg.num_key_value_heads, cfg.head_dim, cfg.variant.kv_repeat
    source = Source(
        (name,),
        ((G * D,),),
        lambda x: x.to(dtype).reshape(-1, D)[:, there].repeat_interleave(copies, 0),
        lambda x: (x[::copies, back].flatten(),),
        (("kv_heads" if copies == 1 else Repeated("kv_heads", G, copies),),),
    )
    return Param(Aval((G * copies, D), dtype, ("kv_heads", None)), source, init)


def rotated_order(width: int, rotated: int) -> list[int]:
    """Channels of a head of a checkpoint, which rotates channel i < rotated / 2 with i + rotated / 2, in the order of `ops.rope`.

    `ops.rope` pairs channel i with i + width / 2, as kernels for heads that are rotated whole do: a head that is rotated in part then goes
    through such a kernel as it lies. Scores do not depend on the order, since queries and keys share it.
    """
    half = rotated // 2
    middle = rotated + (width - rotated) // 2
    return [*range(half), *range(rotated, middle), *range(half, rotated), *range(middle, width)]


def _joined(cfg: AttentionSizes, dtype: torch.dtype, prefix: str, M: int, order: list[int], inverse: list[int]) -> dict[str, Param]:
    H, G, D = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    copies, parts, beside = cfg.variant.kv_repeat, _parts(cfg), _at_once(cfg)
    per = H // (G * copies)

    def join(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        queries, *gates = q.reshape(-1, per, parts, D, q.shape[-1]).unbind(2)
        heads = queries.shape[0]
        k, v = (x.reshape(-1, D, x.shape[-1]).repeat_interleave(heads * D // x.shape[0], 0) for x in (k, v))
        pairs = [queries[:, :, order], *gates]
        at_first = torch.stack(pairs, 2).flatten(1, 3) if beside else torch.cat(pairs, 1).flatten(1, 2)
        return torch.cat([at_first, k[:, order], v], 1).flatten(0, 1)

    def split(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        width = qkv.shape[-1]
        pairs, k, v = qkv.reshape(G * copies, -1, width).split([parts * per * D, D, D], 1)
        heads = pairs.reshape(-1, per, parts, D, width).unbind(2) if beside else pairs.reshape(-1, parts, per, D, width).unbind(1)
        heads = [heads[0][:, :, inverse], *heads[1:]]
        k, v = k[::copies][:, inverse], v[::copies]
        return torch.stack(heads, 2).reshape(-1, width), k.reshape(-1, width), v.reshape(-1, width)

    names = tuple(f"{prefix}{name}_proj.weight" for name in "qkv")
    heads = "kv_heads" if copies == 1 else Repeated("kv_heads", G, copies)
    axes = ((Members("kv_heads", "q_heads"), None), (heads, None), (heads, None))
    source = Source(names, ((parts * H * D, M), (G * D, M), (G * D, M)), join, split, axes)
    return {"qkv": Param(Aval((G * copies * (parts * per + 2) * D, M), dtype, ("kv_heads", None)), source, role="column")}


def _apart(cfg: AttentionSizes, dtype: torch.dtype, prefix: str, M: int, order: list[int], inverse: list[int]) -> dict[str, Param]:
    H, G, D = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    copies, parts = cfg.variant.kv_repeat, _parts(cfg)

    def reordered(q: torch.Tensor, order: list[int]) -> torch.Tensor:
        queries, *gates = q.reshape(-1, parts, D, q.shape[-1]).unbind(1)
        return torch.stack([queries[:, order], *gates], 1).reshape(q.shape)

    def join_kv(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        width = k.shape[-1]
        heads = torch.stack([k.reshape(-1, D, width)[:, order], v.reshape(-1, D, width)], 1)
        return heads.repeat_interleave(copies, 0).reshape(-1, width)

    def split_kv(kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        width = kv.shape[-1]
        k, v = kv.reshape(G, copies, 2, D, width)[:, 0].unbind(1)
        return k[:, inverse].reshape(G * D, width), v.reshape(G * D, width)

    wide = (parts * H * D, M)
    q = Source(
        (prefix + "q_proj.weight",), (wide,), lambda q: reordered(q, order), lambda q: (reordered(q, inverse),), (("q_heads", None),)
    )
    # Ranks that share a head read it whole.
    heads = ("kv_heads" if copies == 1 else Members(None, "kv_heads", copies), None)
    kv = Source((prefix + "k_proj.weight", prefix + "v_proj.weight"), ((G * D, M),) * 2, join_kv, split_kv, (heads,) * 2)
    return {
        "q": Param(Aval(wide, dtype, ("q_heads", None)), q, role="column"),
        "kv": Param(Aval((2 * G * copies * D, M), dtype, ("kv_heads", None)), kv, role="column"),
    }


def _parts(cfg: AttentionSizes) -> int:
    """Vectors of D channels that the query projection has for each head: a query, and its gate where outputs are gated."""
    return 2 if cfg.attn_output_gate else 1


def state(cfg: AttentionSizes, limits: Limits, dtype: torch.dtype, prefix: str = "") -> dict[str, Aval]:
    """Pools of one layer: keys and values, each [pages, P, G, D]; G counts the copies of `Variant.kv_repeat`.

    Of int8 whose scales are not the checkpoint's it has these too, each [pages, G, P] f32.

    Args:
        prefix: begins the names of the layer's tensors in a checkpoint, and decides the format; without one the cache is of floats.
    """
    heads, form = cfg.num_key_value_heads * cfg.variant.kv_repeat, cfg.variant.formats.of_cache(prefix.removesuffix("."))
    shape, axes = (limits.num_pages, limits.page_size, heads, cfg.head_dim), ("pages", None, "kv_heads", None)
    pool = Aval(shape, dtype if form == FLOAT else torch.int8, axes)
    if form in (FLOAT, INT8_STATIC):
        return {"k": pool, "v": pool}
    scale = Aval((limits.num_pages, heads, limits.page_size), torch.float32, ("pages", "kv_heads", None))
    return {"k": pool, "v": pool, "k_scale": scale, "v_scale": scale}


def apply(cfg: AttentionSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> tuple[torch.Tensor, Tree]:
    """Attention; with `attn_output_gate` its output is multiplied by a sigmoid of its own projection (arXiv:2505.06708).

    Args:
        x: [T, M] normalised input, padding rows included, laid out as the residual stream (sequence_parallel.py).

    Returns:
        the layer's output before the residual add, shaped and laid out like x, and the new state.
    """
    x = sequence_parallel.of_queries(x, batch)
    G, D, parts = cfg.num_key_value_heads * cfg.variant.kv_repeat, cfg.head_dim, _parts(cfg)
    per = cfg.num_attention_heads // G
    heads = quant.linear(x, weights["qkv"]).view(-1, G, (parts * per + 2) * D)
    if _at_once(cfg):
        angles = batch.queries.cos, batch.queries.sin
        q, k, v, opened = ops.attention_heads(heads, weights["q_norm"], weights["k_norm"], *angles, cfg.rms_norm_eps)
        state = _write(weights, state, batch, *_shared(batch, k, v))
        return _attend(cfg, weights, state, batch, q, opened), state
    q, *gate, k, v = heads.split([*[per * D] * parts, D, D], -1)
    if "q_norms" in weights:
        q, k = _normed_together(cfg, weights, q, k, batch)
    state = _write(weights, state, batch, *_shared(batch, _keys(cfg, weights, batch.queries, k), v))
    return _attend(cfg, weights, state, batch, _queries(cfg, weights, batch, q.unflatten(-1, (per, D))), *gate), state


def write_kv(cfg: AttentionSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> Tree:
    """The state with the keys and values of x written to it.

    Args:
        weights: parameters that are not joined.
        x: [T, M] normalised input; every device of the group has all of it.
    """
    G, D = cfg.num_key_value_heads * cfg.variant.kv_repeat, cfg.head_dim
    k, v = quant.linear(x, weights["kv"]).view(-1, G, 2 * D).split(D, -1)
    return _write(weights, state, batch, _keys(cfg, weights, batch, k), v)


def attend(cfg: AttentionSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """Attention of x over a state that holds the keys and values of x already, before the residual add.

    Args:
        weights: parameters that are not joined.
        x: [T, M] normalised input; every device of the group has all of it.

    Returns:
        [T, M], laid out as the residual stream.
    """
    H, D = cfg.num_attention_heads, cfg.head_dim
    q, *gate = quant.linear(x, weights["q"]).view(-1, H, _parts(cfg) * D).split(D, -1)
    return _attend(cfg, weights, state, batch, _queries(cfg, weights, batch, q), *gate)


def _at_once(cfg: AttentionSizes) -> bool:
    """Whether one operation takes the projection apart: it is for heads with gates and zero-centred norms."""
    return cfg.variant.split_at_once and cfg.attn_output_gate and cfg.norm_offset == 1.0


def _shared(batch: Batch, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [T, G, D] of all tokens, where devices share these."""
    if batch.sliced is None:
        return k, v
    joined = sequence_parallel.whole(torch.cat([k, v], -1).flatten(1), batch.size * batch.q_len)
    k, v = joined.unflatten(1, (k.shape[1], -1)).split(k.shape[-1], -1)
    return k, v


def _write(weights: Tree, state: Tree, batch: Batch, k: torch.Tensor, v: torch.Tensor) -> Tree:
    """Writes keys and values, each [T, G, D]."""
    slots, v = batch.slots(state["k"].shape[1]), v.contiguous()
    if "k_scale" in state:
        pools = ops.quant_cache_write(state["k"], state["v"], state["k_scale"], state["v_scale"], k, v, slots)
    elif "k_scale" in weights:
        pools = ops.static_cache_write(state["k"], state["v"], k, v, weights["k_scale"], weights["v_scale"], slots)
    else:
        pools = ops.cache_write(state["k"], state["v"], k, v, slots)
    return dict(zip(("k", "v", "k_scale", "v_scale"), pools, strict=False))


def _attend(
    cfg: AttentionSizes, weights: Tree, state: Tree, batch: Batch, q: torch.Tensor, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of queries [T, ...], gated by [T, ...] if at all; both hold the heads in order."""
    H, D = cfg.num_attention_heads, cfg.head_dim
    place = batch.queries
    q = q.view(place.size, place.q_len, H, D)
    out = _paged_attention(weights, state, q, place.page_table, place.num_computed_tokens, place.query_lens, D**-0.5).view(-1, H * D)
    gated = out if gate is None else out * torch.sigmoid(gate.reshape(-1, H * D))
    return sequence_parallel.of_attention(gated, weights["out"], batch)


def _paged_attention(weights: Tree, state: Tree, q: torch.Tensor, *place: Any) -> torch.Tensor:
    """Attention over the pools as they are: of floats, or of int8 with scales of the state or of the weights."""
    if "k_scale" in state:
        out: torch.Tensor = ops.quant_paged_attention(q, state["k"], state["v"], state["k_scale"], state["v_scale"], *place)
    elif "k_scale" in weights:
        out = ops.static_quant_paged_attention(q, state["k"], state["v"], weights["k_scale"], weights["v_scale"], *place)
    else:
        out = ops.paged_attention(q, state["k"], state["v"], *place)
    return out


def _queries(cfg: AttentionSizes, weights: Tree, batch: Batch, q: torch.Tensor) -> torch.Tensor:
    """Queries [T, ..., D] after their norm, if they have one, and rotation, [T, H, D]."""
    normed = _head_norm(cfg, q, weights.get("q_norm")).reshape(-1, cfg.num_attention_heads, cfg.head_dim)
    rotated: torch.Tensor = ops.rope(normed, batch.queries.cos, batch.queries.sin)
    return rotated


def _keys(cfg: AttentionSizes, weights: Tree, batch: Queries, k: torch.Tensor) -> torch.Tensor:
    """Keys [T, G, D] after their norm, if they have one, and rotation."""
    rotated: torch.Tensor = ops.rope(_head_norm(cfg, k, weights.get("k_norm")), batch.cos, batch.sin)
    return rotated


def _normed_together(
    cfg: AttentionSizes, weights: Tree, q: torch.Tensor, k: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norms of all query heads [T, G, per*D] as one vector and of all key heads [T, G, D].

    Copies of key heads each count, in the sum as in the size. Ranks add the sums of both in one reduction.
    """
    squares = torch.stack([x.float().square().sum((1, 2)) for x in (q, k)], 1)
    squares = constrain(squares, None, None) if batch.sliced is None else squares
    scales = [torch.rsqrt(each / x.shape[1:].numel() + cfg.rms_norm_eps) for each, x in zip(squares.unbind(1), (q, k), strict=True)]
    q, k = ((x.float() * scale[:, None, None]).to(x.dtype) for x, scale in zip((q, k), scales, strict=True))
    return q * weights["q_norms"].view(q.shape[1:]), k * weights["k_norms"]


def _head_norm(cfg: AttentionSizes, x: torch.Tensor, weight: Tree | None) -> torch.Tensor:
    """RMS norm of each head of x [..., D], weight [D]; x itself without a weight."""
    return x if weight is None else norms.rms_norm(x, weight, cfg.rms_norm_eps, cfg.norm_offset)
