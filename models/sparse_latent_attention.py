"""Multi-head latent attention over the keys that an indexer chooses: parameters, paged pools and functions."""

from __future__ import annotations

from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.types import Aval, Limits, Tree
from . import index_cache, latent_attention, quant
from .attention import rotated_order
from .batch import Batch
from .params import Param, Source

INDEX_EPS = 1e-6
"""Of the norm of the indexer's keys."""


class SparseLatentSizes(latent_attention.LatentSizes, Protocol):
    """Fields of a model's configuration that the layer reads; queries are compressed."""

    @property
    def index_n_heads(self) -> int: ...
    @property
    def index_head_dim(self) -> int: ...
    @property
    def index_topk(self) -> int: ...
    @property
    def indexer_rope_interleave(self) -> bool: ...


def params(cfg: SparseLatentSizes, dtype: torch.dtype, prefix: str) -> dict[str, Param]:
    """Parameters of one layer; `prefix` begins their names in a checkpoint.

    Keys: those of `latent_attention.params`; `index_q` makes of compressed queries those of the indexer; `index_down` makes of a token the
    indexer's key and, behind it, the weights of its heads; `index_norm` and `index_shift` are of the norm of keys; those of
    `index_cache.params`.
    """
    M, heads, D, prefix_index = cfg.hidden_size, cfg.index_n_heads, cfg.index_head_dim, prefix + "indexer."
    order = _rotated_order(cfg)
    inverse = [order.index(i) for i in range(D)]

    def reordered(x: torch.Tensor, order: list[int]) -> torch.Tensor:
        return x.reshape(-1, D, x.shape[-1])[:, order].reshape(x.shape)

    def channels(name: str, init: str) -> Param:
        source = Source((f"{prefix_index}k_norm.{name}",), ((D,),), lambda x: x[order], lambda x: (x[inverse],))
        return Param(Aval((D,), dtype), source, init)

    queries = Source(
        (prefix_index + "wq_b.weight",),
        ((heads * D, cfg.q_lora_rank),),
        lambda x: reordered(x, order),
        lambda x: (reordered(x, inverse),),
    )
    down = Source(
        (prefix_index + "wk.weight", prefix_index + "weights_proj.weight"),
        ((D, M), (heads, M)),
        lambda key, weights: torch.cat([reordered(key, order), weights]),
        lambda x: (reordered(x[:D], inverse), x[D:]),
    )
    return {
        **latent_attention.params(cfg, dtype, prefix),
        "index_q": Param(Aval((heads * D, cfg.q_lora_rank), dtype), queries, role="column"),
        "index_down": Param(Aval((D + heads, M), dtype), down, role="column"),
        "index_norm": channels("weight", "ones"),
        "index_shift": channels("bias", "zeros"),
        **index_cache.params(cfg, dtype, prefix),
    }


def _rotated_order(cfg: SparseLatentSizes) -> list[int]:
    """Channels of a head of a checkpoint's indexer in the order of `ops.rope`, which pairs channel i with i + D/2.

    A checkpoint rotates the first R channels: channel i with i + R/2, or with `indexer_rope_interleave` channel 2i with 2i + 1.
    """
    D, R = cfg.index_head_dim, cfg.rotary.dim
    halves = [*range(0, R, 2), *range(1, R, 2), *range(R, D)] if cfg.indexer_rope_interleave else range(D)
    return [halves[i] for i in rotated_order(D, R)]


def state(cfg: SparseLatentSizes, limits: Limits, dtype: torch.dtype, prefix: str = "") -> dict[str, Aval]:
    """Pools of one layer: those of `latent_attention.state` and of `index_cache.state`."""
    return {**latent_attention.state(cfg, limits, dtype, prefix), **index_cache.state(cfg, limits, dtype, prefix)}


def apply(cfg: SparseLatentSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> tuple[torch.Tensor, Tree]:
    """Attention over latents of the `index_topk` best keys (arXiv:2512.02556), as `latent_attention.apply`."""
    return apply_and_pass(cfg, weights, state, batch, x)[:2]


def apply_and_pass(
    cfg: SparseLatentSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor
) -> tuple[torch.Tensor, Tree, torch.Tensor]:
    """The same, and the chosen keys [B, Q, K], which layers behind this one read too."""
    rows, entries = compress(cfg, weights, x, batch)
    state = write(cfg, weights, state, batch, entries)
    out, chosen = attend_and_choose(cfg, weights, state, batch, rows)
    return out, state, chosen


def apply_to(
    cfg: latent_attention.LatentSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, Tree]:
    """The same over keys that a layer before this one chose; parameters and state are those of `latent_attention`."""
    rows, entries = latent_attention.compress(cfg, weights, x, batch)
    state = latent_attention.write(cfg, weights, state, batch, entries)
    return attend_to(cfg, weights, state, batch, rows, chosen), state


def compress(cfg: SparseLatentSizes, weights: Tree, x: torch.Tensor, batch: Batch) -> tuple[Tree, Tree]:
    """As `latent_attention.compress`, with the weights of the indexer's heads [T, I] and its keys [T, D] before their norm.

    Scores of all keys grow alike with the weights, so that constant factors of the published code are left out.
    """
    widths = cfg.index_head_dim, cfg.index_n_heads
    rows, entries, (key, head_weights) = latent_attention.compress_beside(cfg, weights, x, batch, "index_down", widths)
    return {**rows, "weights": head_weights.contiguous()}, {**entries, "index": key}


def write(cfg: SparseLatentSizes, weights: Tree, state: Tree, batch: Batch, entries: Tree) -> Tree:
    """The state with what `compress` made of tokens written to it."""
    state = latent_attention.write(cfg, weights, state, batch, entries)
    key = ops.layer_norm(entries["index"], weights["index_norm"], weights["index_shift"], INDEX_EPS)
    key = ops.rope(key[:, None], batch.cos, batch.sin)
    return index_cache.write(weights, state, key, batch.slots(state["index"].shape[1]))


def attend(cfg: SparseLatentSizes, weights: Tree, state: Tree, batch: Batch, rows: Tree) -> torch.Tensor:
    """As `latent_attention.attend`, over the keys that the indexer chooses."""
    return attend_and_choose(cfg, weights, state, batch, rows)[0]


def attend_and_choose(cfg: SparseLatentSizes, weights: Tree, state: Tree, batch: Batch, rows: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the keys [B, Q, K]."""
    queries = latent_attention.queries(cfg, weights, batch, rows["query"])
    chosen = index_cache.choose(weights, state, batch.queries, *index_operands(cfg, weights, batch, rows), most_keys(cfg, state, batch))
    return _attend(cfg, weights, state, batch, queries, chosen), chosen


def attend_to(
    cfg: latent_attention.LatentSizes, weights: Tree, state: Tree, batch: Batch, rows: Tree, chosen: torch.Tensor
) -> torch.Tensor:
    """As `latent_attention.attend`, over the keys `chosen` [B, Q, K]."""
    return _attend(cfg, weights, state, batch, latent_attention.queries(cfg, weights, batch, rows["query"]), chosen)


def _attend(
    cfg: latent_attention.LatentSizes,
    weights: Tree,
    state: Tree,
    batch: Batch,
    queries: tuple[torch.Tensor, torch.Tensor],
    chosen: torch.Tensor,
) -> torch.Tensor:
    rows = batch.queries
    place = (chosen, rows.page_table, rows.num_computed_tokens, rows.query_lens, latent_attention.scale(cfg))
    if "packed" in state:
        out = ops.quant_sparse_attention(*queries, state["packed"], *place)
    else:
        out = ops.sparse_attention(*queries, state["latent"], state["rotary"], *place)
    return latent_attention.project(cfg, weights, batch, out)


def index_operands(cfg: SparseLatentSizes, weights: Tree, batch: Batch, rows: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of the indexer [B, Q, I, D], and the weights of its heads [B, Q, I]."""
    heads, D = cfg.index_n_heads, cfg.index_head_dim
    place = batch.queries
    q = ops.rope(quant.linear(rows["query"], weights["index_q"]).view(-1, heads, D), place.cos, place.sin)
    return q.view(place.size, place.q_len, heads, D), rows["weights"].reshape(place.size, place.q_len, heads)


def most_keys(cfg: SparseLatentSizes, state: Tree, batch: Batch) -> int:
    """Keys of a query: `index_topk`, or as many as the page table has."""
    return min(cfg.index_topk, int(batch.page_table.shape[1] * state["index"].shape[1]))
