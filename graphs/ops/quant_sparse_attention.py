"""Multi-head latent attention over chosen keys of a pool of packed int8 latents."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from .packed_latents import tile_of, unpacked
from .sparse_attention import SparseAttention, sparse_attention_reference
from .sparse_index import keys_of_padding


class QuantSparseAttention(NamedTuple):
    """Operands of `quant_sparse_attention`: those of `sparse_attention`, with one pool as `packed_latent_write` writes it."""

    q: Tensor  # [B, Q, H, L]
    q_rope: Tensor  # [B, Q, H, R]
    cache: Tensor  # [pages, P, 1, W] int8
    indices: Tensor  # [B, Q, K] int32 positions of keys that the query sees, and -1 behind them
    page_table: Tensor  # [B, N] page ids
    num_computed_tokens: Tensor  # [B] position of each row's first query
    query_lens: Tensor  # [B] valid queries of each row
    scale: float  # multiplies the scores


quant_sparse_attention = Primitive(
    "quant_sparse_attention",
    QuantSparseAttention,
    factors="b _ h _, b _ h _, _ _ _ _, b _ _, b _, b, b -> b _ h _",
    like="q",
)


@quant_sparse_attention.reference
def quant_sparse_attention_reference(args: QuantSparseAttention) -> Tensor:
    """Attention of every head over the keys that `indices` names, of latents that are integers times their scales.

    Returns:
        [B, Q, H, L], dtype of q: weighted sums of latents. Softmax in f32.
    """
    q, q_rope, cache, indices, page_table, num_computed_tokens, query_lens, scale = args
    pages = page_table.reshape(-1)
    latents, rotary = unpacked(cache.index_select(0, pages), q.shape[-1], q.dtype)
    own = torch.arange(pages.shape[0], dtype=page_table.dtype, device=q.device).view(page_table.shape)
    return sparse_attention_reference(SparseAttention(q, q_rope, latents, rotary, indices, own, num_computed_tokens, query_lens, scale))


_ABSORBED, _BY_TILE, _IN_ROW = 2, 2, 1
"""Attributes of the NPU's kernel, each the only legal one: keys whose values are the latents, rounded by tiles, with scales in the row."""


@quant_sparse_attention.lowering("npu")
def _npu(args: QuantSparseAttention) -> Any:
    """The sparse kernel over packed rows, as in `sparse_attention`; a query's rotary part lies behind it."""
    q, q_rope, cache, indices, page_table, num_computed_tokens, _, scale = args
    table, lengths = keys_of_padding(page_table, num_computed_tokens, q.shape[1], cache.shape[1])
    return torch.ops.npu.npu_kv_quant_sparse_flash_attention(
        torch.cat([q, q_rope], -1),
        cache,
        cache,
        indices[:, :, None],
        scale,
        _BY_TILE,
        _BY_TILE,
        block_table=table,
        actual_seq_lengths_kv=lengths,
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=_ABSORBED,
        quant_scale_repo_mode=_IN_ROW,
        tile_size=tile_of(q.shape[-1]),
        rope_head_dim=q_rope.shape[-1],
    )


@quant_sparse_attention.cost
def _cost(args: QuantSparseAttention) -> Cost:
    q, q_rope, cache, indices, page_table, num_computed_tokens, query_lens, _ = args
    B, Q, H, L = q.shape
    R, K = q_rope.shape[-1], indices.shape[2]
    # Each query reads its own keys, or all of the row's once where those are fewer.
    entries = B * min(Q * K, page_table.shape[1] * cache.shape[1]) * cache.shape[-1]
    read = nbytes(q, q_rope, indices, page_table, num_computed_tokens, query_lens) + entries
    return Cost(2 * B * Q * H * K * (2 * L + R), read, nbytes(q))
