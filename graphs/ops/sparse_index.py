"""The keys that a sparse attention reads: those with the best scores of a small attention that only scores."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from .mla_attention import gathered


class SparseIndex(NamedTuple):
    """Operands of `sparse_index`, of I heads whose keys are one head."""

    q: Tensor  # [B, Q, I, D]
    weights: Tensor  # [B, Q, I] of each head's scores
    cache: Tensor  # [pages, P, 1, D] keys
    page_table: Tensor  # [B, N] page ids; key j of row b lies in page `page_table[b, j // P]` at offset `j % P`
    num_computed_tokens: Tensor  # [B] position of each row's first query; query t sees keys 0..starts+t
    query_lens: Tensor  # [B] valid queries of each row
    top_k: int  # keys of a query, at most N * P


sparse_index = Primitive("sparse_index", SparseIndex, factors="b _ _ _, b _ _, _ _ _ _, b _, b, b -> b _ _")


@sparse_index.abstract
def _abstract(args: SparseIndex) -> Tensor:
    return torch.empty((*args.q.shape[:2], args.top_k), dtype=torch.int32, device=args.q.device)


@sparse_index.reference
def sparse_index_reference(args: SparseIndex) -> Tensor:
    """The `top_k` keys with the largest `sum_h weights[h] * relu(q[h] . k)`, in f32, of those that a query sees (arXiv:2512.02556).

    Returns:
        positions [B, Q, top_k] int32 in no particular order, -1 behind them where a query sees fewer keys.
    """
    q, weights, cache, page_table, num_computed_tokens, _, top_k = args
    keys = gathered(cache, page_table)
    scores = torch.einsum("bqid,bkd->bqik", q.float(), keys.float()).relu()
    scores = torch.einsum("bqi,bqik->bqk", weights.float(), scores)
    return best_keys(scores, num_computed_tokens, top_k)


def best_keys(scores: Tensor, num_computed_tokens: Tensor, top_k: int) -> Tensor:
    """Positions [B, Q, top_k] int32 of the largest scores [B, Q, K] f32 that a query sees, -1 behind them where it sees fewer keys.

    Scores of keys of pages that were never written can be NaN, which `topk` takes for the largest: none of those is seen.
    """
    key, token = (torch.arange(n, dtype=torch.int32, device=scores.device) for n in (scores.shape[2], scores.shape[1]))
    seen = key[None, None, :] <= (num_computed_tokens[:, None] + token[None, :])[:, :, None]
    best = torch.where(seen, scores, torch.full((), float("-inf"), device=scores.device)).topk(top_k, -1)
    return torch.where(best.values > float("-inf"), best.indices.to(torch.int32), -1)


@sparse_index.lowering("npu")
def _npu(args: SparseIndex) -> Any:
    """The kernel of the lightning indexer over the page table; its mask is aligned to the last key, as that of `paged_attention`."""
    q, weights, cache, page_table, num_computed_tokens, _, top_k = args
    table, lengths = keys_of_padding(page_table, num_computed_tokens, q.shape[1], cache.shape[1])
    indices, _ = torch.ops.npu.npu_lightning_indexer(
        q,
        cache,
        weights,
        actual_seq_lengths_key=lengths,
        block_table=table,
        layout_query="BSND",
        layout_key="PA_BSND",
        sparse_count=top_k,
        sparse_mode=3,
    )
    return indices.squeeze(2)


def keys_of_padding(page_table: Tensor, num_computed_tokens: Tensor, Q: int, P: int) -> tuple[Tensor, Tensor]:
    """A table with null pages for what invalid queries at the end of a full context see, and each row's number of keys [B] int32."""
    if Q > 1:
        page_table = torch.cat([page_table, page_table.new_zeros(page_table.shape[0], -(-(Q - 1) // P))], 1)
    return page_table, (num_computed_tokens + Q).to(torch.int32)


@sparse_index.cost
def _cost(args: SparseIndex) -> Cost:
    q, weights, cache, page_table, num_computed_tokens, query_lens, top_k = args
    (B, Q, heads, D), keys = q.shape, page_table.shape[1] * cache.shape[1]
    read = nbytes(q, weights, page_table, num_computed_tokens, query_lens) + B * keys * D * cache.dtype.itemsize
    return Cost(2 * B * Q * heads * keys * (D + 1), read, 4 * B * Q * top_k)
