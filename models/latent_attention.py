"""The multi-head latent attention layer: parameters, paged pools of latents and functions."""

from __future__ import annotations

from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.ops.packed_latents import packed_axis, packed_width
from ..graphs.types import Aval, Limits, Tree
from . import quant, sequence_parallel
from .batch import Batch
from .params import Param, Source, norm
from .quant.formats import INT8
from .rotary import Rotary
from .variant import Variant

NORM_EPS = 1e-6
"""Of the norms of compressed queries and of latents, whatever `rms_norm_eps` says: as in the published models' own code."""


class LatentSizes(Protocol):
    """Fields of a model's configuration that the layer reads; a q_lora_rank of 0 is a projection that is not compressed."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def q_lora_rank(self) -> int: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def rope_interleave(self) -> bool: ...
    @property
    def rotary(self) -> Rotary: ...
    @property
    def packs_latents(self) -> bool: ...
    @property
    def variant(self) -> Variant: ...


def params(cfg: LatentSizes, dtype: torch.dtype, prefix: str) -> dict[str, Param]:
    """Parameters of one layer; `prefix` begins their names in a checkpoint.

    Keys: `down` makes of a token its latent, its rotary part and, where queries are compressed, before those its compressed query;
    `q_up` makes of that, or of the token, the queries; `kv_up` [H, nope + V, L] makes of latents, by head, keys and values; `out`.
    """
    M, H, L, R = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    head, width = cfg.qk_nope_head_dim + R, cfg.q_lora_rank or M
    q_name = "q_b_proj" if cfg.q_lora_rank else "q_proj"
    queries = Source(
        (f"{prefix}{q_name}.weight",),
        ((H * head, width),),
        lambda x: _rotated_rows(cfg, x, head),
        lambda x: (_rotated_rows(cfg, x, head, inverse=True),),
        (("q_heads", None),),
    )
    values = cfg.qk_nope_head_dim + cfg.v_head_dim
    expand = Source(
        (prefix + "kv_b_proj.weight",),
        ((H * values, L),),
        lambda x: x.reshape(-1, values, x.shape[-1]),
        lambda x: (x.reshape(-1, x.shape[-1]),),
        (("q_heads", None),),
    )
    tree = {
        "down": _down(cfg, dtype, prefix),
        "kv_norm": norm(prefix + "kv_a_layernorm", L, dtype, 0.0),
        "q_up": Param(Aval((H * head, width), dtype, ("q_heads", None)), queries, role="column"),
        "kv_up": Param(Aval((H, values, L), dtype, ("q_heads", None, None)), expand),
        "out": Param(
            Aval((M, H * cfg.v_head_dim), dtype, (None, "q_heads")),
            Source((prefix + "o_proj.weight",), ((M, H * cfg.v_head_dim),)),
            role="row",
        ),
    }
    return tree | ({"q_norm": norm(prefix + "q_a_layernorm", cfg.q_lora_rank, dtype, 0.0)} if cfg.q_lora_rank else {})


def _down(cfg: LatentSizes, dtype: torch.dtype, prefix: str) -> Param:
    M, rows = cfg.hidden_size, cfg.kv_lora_rank + cfg.qk_rope_head_dim
    latent = (prefix + "kv_a_proj_with_mqa.weight", (rows, M))
    compressed = [(prefix + "q_a_proj.weight", (cfg.q_lora_rank, M))] if cfg.q_lora_rank else []
    names, shapes = zip(*compressed, latent, strict=True)

    def join(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([*tensors[:-1], _rotated_rows(cfg, tensors[-1], rows)])

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *others, keys = x.split([shape[0] for shape in shapes])
        return *others, _rotated_rows(cfg, keys, rows, inverse=True)

    return Param(Aval((cfg.q_lora_rank + rows, M), dtype), Source(names, shapes, join, split), role="column")


def _rotated_rows(cfg: LatentSizes, x: torch.Tensor, width: int, *, inverse: bool = False) -> torch.Tensor:
    """Rows of heads of `width` whose last channels are rotated, in the order of `ops.rope`, which pairs channel i with i + R/2.

    A checkpoint that interleaves pairs 2i with 2i + 1. Scores do not depend on the order, since queries and keys share it.
    """
    if not cfg.rope_interleave:
        return x
    R = cfg.qk_rope_head_dim
    order = [*range(0, R, 2), *range(1, R, 2)]
    order = [order.index(i) for i in range(R)] if inverse else order
    rows = [*range(width - R), *(width - R + i for i in order)]
    return x.reshape(-1, width, x.shape[-1])[:, rows].reshape(x.shape)


def state(cfg: LatentSizes, limits: Limits, dtype: torch.dtype, prefix: str = "") -> dict[str, Aval]:
    """Pools of one layer, whole on every device: latents [pages, P, 1, L] and rotary parts [pages, P, 1, R].

    Where they are cached as int8 one pool has both, `packed` (ops/packed_latents.py), which only attention over chosen keys reads.

    Args:
        prefix: begins the names of the layer's tensors in a checkpoint.
    """
    pages, axes = (limits.num_pages, limits.page_size, 1), ("pages", None, None, None)
    if cfg.packs_latents and cfg.variant.formats.of_cache(prefix.removesuffix(".")) == INT8:
        width = packed_width(cfg.kv_lora_rank, cfg.qk_rope_head_dim, dtype)
        return {"packed": Aval((*pages, width), torch.int8, (*axes[:3], packed_axis(cfg.kv_lora_rank, dtype)))}
    return {"latent": Aval((*pages, cfg.kv_lora_rank), dtype, axes), "rotary": Aval((*pages, cfg.qk_rope_head_dim), dtype, axes)}


def apply(cfg: LatentSizes, weights: Tree, state: Tree, batch: Batch, x: torch.Tensor) -> tuple[torch.Tensor, Tree]:
    """Attention over latents of keys and values (arXiv:2405.04434).

    Args:
        x: [T, M] normalised input, padding rows included, laid out as the residual stream (sequence_parallel.py).

    Returns:
        the layer's output before the residual add, shaped and laid out like x, and the new state.
    """
    rows, entries = compress(cfg, weights, x, batch)
    state = write(cfg, weights, state, batch, entries)
    return attend(cfg, weights, state, batch, rows), state


def compress(cfg: LatentSizes, weights: Tree, x: torch.Tensor, batch: Batch) -> tuple[Tree, Tree]:
    """What `attend` and `write` read of tokens x, whole on every device; of the former its own where devices share tokens.

    The former is `query`, [T, q_lora_rank] normalised, or [T, M]; the latter `keys`, latents beside rotary parts [T, L + R].
    """
    if not cfg.q_lora_rank:
        x = sequence_parallel.of_queries(x, batch)
        return {"query": x}, {"keys": sequence_parallel.whole(quant.linear(x, weights["down"]), batch.size * batch.q_len)}
    rows, entries, _ = compress_beside(cfg, weights, x, batch)
    return rows, entries


def compress_beside(
    cfg: LatentSizes, weights: Tree, x: torch.Tensor, batch: Batch, other: str = "", widths: tuple[int, ...] = ()
) -> tuple[Tree, Tree, list[torch.Tensor]]:
    """What `compress` returns where queries are compressed, and parts of the product of x and another weight, of which the first is one
    of keys and the others are of queries.

    Each device multiplies its own tokens of the stream, so that one gather of narrow rows follows: of keys alone where tokens are shared.
    """
    products = [quant.linear(x, weights[name]) for name in (("down", other) if other else ("down",))]
    joined, tokens = torch.cat(products, -1) if other else products[0], batch.size * batch.q_len
    sizes = [cfg.q_lora_rank, cfg.kv_lora_rank + cfg.qk_rope_head_dim, *widths]
    if batch.sliced is None:
        query, keys, *rest = sequence_parallel.whole(joined, tokens).split(sizes, -1)
    else:
        query, keys, *rest = joined.split(sizes, -1)
        shared = sequence_parallel.whole(torch.cat([keys, *rest[:1]], -1) if rest else keys.contiguous(), tokens)
        keys, *first = shared.split([sizes[1], *widths[:1]], -1)
        rest = [*first, *rest[1:]]
    return {"query": ops.rms_norm(query, weights["q_norm"], NORM_EPS, 0.0)}, {"keys": keys}, rest


def write(cfg: LatentSizes, weights: Tree, state: Tree, batch: Batch, entries: Tree) -> Tree:
    """The state with what `compress` made of tokens written to it."""
    latent, rotary = entries["keys"].split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], -1)
    latent = ops.rms_norm(latent, weights["kv_norm"], NORM_EPS, 0.0)
    rotary = ops.rope(rotary[:, None], batch.cos, batch.sin)
    if "packed" in state:
        slots = batch.slots(state["packed"].shape[1])
        return {**state, "packed": ops.packed_latent_write(state["packed"], latent[:, None], rotary, slots)}
    latents, rotaries = ops.cache_write(state["latent"], state["rotary"], latent[:, None], rotary, batch.slots(state["latent"].shape[1]))
    return {**state, "latent": latents, "rotary": rotaries}


def attend(cfg: LatentSizes, weights: Tree, state: Tree, batch: Batch, rows: Tree) -> torch.Tensor:
    """Attention of what `compress` made of queries over a state that holds their own keys already; [T, M], laid out as the stream."""
    q, q_rope = queries(cfg, weights, batch, rows["query"])
    place = batch.queries
    out = ops.mla_attention(
        q, q_rope, state["latent"], state["rotary"], place.page_table, place.num_computed_tokens, place.query_lens, scale(cfg)
    )
    return project(cfg, weights, batch, out)


def queries(cfg: LatentSizes, weights: Tree, batch: Batch, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in the space of latents [B, Q, H, L], and their rotary parts [B, Q, H, R]."""
    H, nope, R = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    plain, rotary = quant.linear(query, weights["q_up"]).view(-1, H, nope + R).split([nope, R], -1)
    absorbed = ops.head_linear(plain, weights["kv_up"][:, :nope])
    place = batch.queries
    rotary = ops.rope(rotary, place.cos, place.sin)
    return absorbed.view(place.size, place.q_len, H, -1), rotary.view(place.size, place.q_len, H, R)


def scale(cfg: LatentSizes) -> float:
    """What scores are multiplied by."""
    scaling = cfg.rotary.scaling
    return float((cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5 * (scaling.softmax if scaling else 1.0))


def project(cfg: LatentSizes, weights: Tree, batch: Batch, out: torch.Tensor) -> torch.Tensor:
    """The layer's output of sums of latents [B, Q, H, L]: values of each head, and the row-parallel product of them."""
    H = cfg.num_attention_heads
    values = ops.head_linear(out.view(-1, H, cfg.kv_lora_rank), weights["kv_up"][:, cfg.qk_nope_head_dim :].transpose(1, 2))
    return sequence_parallel.of_attention(values.reshape(-1, H * cfg.v_head_dim), weights["out"], batch)
