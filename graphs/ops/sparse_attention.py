"""Multi-head latent attention over chosen keys."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from .mla_attention import MlaAttention, attend
from .sparse_index import keys_of_padding


class SparseAttention(NamedTuple):
    """Operands of `sparse_attention`: those of `mla_attention`, and the keys of each query."""

    q: Tensor  # [B, Q, H, L]
    q_rope: Tensor  # [B, Q, H, R]
    cache: Tensor  # [pages, P, 1, L] latents
    rope_cache: Tensor  # [pages, P, 1, R]
    indices: Tensor  # [B, Q, K] int32 positions of keys that the query sees, and -1 behind them
    page_table: Tensor  # [B, N] page ids
    num_computed_tokens: Tensor  # [B] position of each row's first query
    query_lens: Tensor  # [B] valid queries of each row
    scale: float  # multiplies the scores


sparse_attention = Primitive(
    "sparse_attention", SparseAttention, like="q", factors="b _ h _, b _ h _, _ _ _ _, _ _ _ _, b _ _, b _, b, b -> b _ h _"
)


@sparse_attention.reference
def sparse_attention_reference(args: SparseAttention) -> Tensor:
    """Attention of every head over the keys that `indices` names.

    Returns:
        [B, Q, H, L], dtype of q: weighted sums of latents. Softmax in f32.
    """
    q, q_rope, cache, rope_cache, indices, page_table, num_computed_tokens, query_lens, scale = args
    keys = page_table.shape[1] * cache.shape[1]
    # -1 names a column behind the last key.
    column = torch.where(indices < 0, keys, indices).long()
    chosen = torch.zeros(*indices.shape[:2], keys + 1, device=q.device).scatter(2, column, 1.0)[..., :keys] > 0
    return attend(MlaAttention(q, q_rope, cache, rope_cache, page_table, num_computed_tokens, query_lens, scale), chosen)


_ABSORBED = 2
"""`attention_mode` of the NPU's kernel: keys of latents and rotary parts, whose values are the latents."""


@sparse_attention.lowering("npu")
def _npu(args: SparseAttention) -> Any:
    """The sparse kernel, token by token of the pages; its mask is aligned to the last key, as that of `paged_attention`."""
    q, q_rope, cache, rope_cache, indices, page_table, num_computed_tokens, _, scale = args
    table, lengths = keys_of_padding(page_table, num_computed_tokens, q.shape[1], cache.shape[1])
    out, _, _ = torch.ops.npu.npu_sparse_flash_attention(
        q,
        cache,
        cache,
        indices[:, :, None],
        scale,
        block_table=table,
        actual_seq_lengths_kv=lengths,
        query_rope=q_rope,
        key_rope=rope_cache,
        sparse_block_size=1,
        layout_query="BSND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=_ABSORBED,
    )
    return out


@sparse_attention.cost
def _cost(args: SparseAttention) -> Cost:
    q, q_rope, cache, rope_cache, indices, page_table, num_computed_tokens, query_lens, _ = args
    B, Q, H, L = q.shape
    R, K = q_rope.shape[-1], indices.shape[2]
    # Each query reads its own keys, or all of the row's once where those are fewer.
    entries = B * min(Q * K, page_table.shape[1] * cache.shape[1]) * (L * cache.dtype.itemsize + R * rope_cache.dtype.itemsize)
    read = nbytes(q, q_rope, indices, page_table, num_computed_tokens, query_lens) + entries
    return Cost(2 * B * Q * H * K * (2 * L + R), read, nbytes(q))
