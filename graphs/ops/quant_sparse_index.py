"""The keys that a sparse attention reads, chosen by scores of int8."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from ..quantise import quantise_rows
from .mla_attention import gathered
from .sparse_index import best_keys, keys_of_padding


class QuantSparseIndex(NamedTuple):
    """Operands of `quant_sparse_index`: those of `sparse_index`, whose keys are integers with a scale each."""

    q: Tensor  # [B, Q, I, D]
    weights: Tensor  # [B, Q, I] of each head's scores
    cache: Tensor  # [pages, P, 1, D] int8 keys
    scale: Tensor  # [pages, P, 1] f16
    page_table: Tensor  # [B, N] page ids
    num_computed_tokens: Tensor  # [B] position of each row's first query
    query_lens: Tensor  # [B] valid queries of each row
    top_k: int  # keys of a query, at most N * P


quant_sparse_index = Primitive("quant_sparse_index", QuantSparseIndex, factors="b _ _ _, b _ _, _ _ _ _, _ _ _, b _, b, b -> b _ _")


@quant_sparse_index.abstract
def _abstract(args: QuantSparseIndex) -> Tensor:
    return torch.empty((*args.q.shape[:2], args.top_k), dtype=torch.int32, device=args.q.device)


@quant_sparse_index.reference
def quant_sparse_index_reference(args: QuantSparseIndex) -> Tensor:
    """As `sparse_index`, where each head of a query is rounded to int8 too; weights times its scale are in f16, as the NPU has them.

    Returns:
        positions [B, Q, top_k] int32 in no particular order, -1 behind them where a query sees fewer keys.
    """
    q, weights, cache, scale, page_table, num_computed_tokens, _, top_k = args
    rows, own = quantise_rows(q)
    keys, factors = gathered(cache, page_table), gathered(scale.unsqueeze(-1), page_table).squeeze(-1).float()
    # The sums of a head's products are integers that f32 has exactly.
    scores = torch.einsum("bqid,bkd->bqik", rows.float(), keys.float()).relu()
    shares = (weights.half() * own.half()).float()
    scores = torch.einsum("bqi,bqik->bqk", shares, scores) * factors[:, None]
    return best_keys(scores, num_computed_tokens, top_k)


ONLY_HEADS = 64
"""Heads that the NPU's kernel takes before CANN 9.1, which takes fewer (quant_lightning_indexer_tiling.cpp of ops-transformer)."""


@quant_sparse_index.lowering("npu", needs=("cann>=9.1",))
def _npu(args: QuantSparseIndex) -> Any:
    """The kernel of the lightning indexer over int8; its mask is aligned to the last key, as that of `paged_attention`."""
    q, weights, cache, scale, page_table, num_computed_tokens, _, top_k = args
    rows, own = torch.ops.npu.npu_dynamic_quant(q)
    table, lengths = keys_of_padding(page_table, num_computed_tokens, q.shape[1], cache.shape[1])
    indices = torch.ops.npu.npu_quant_lightning_indexer(
        rows,
        cache,
        weights.to(torch.float16),
        own.to(torch.float16),
        scale,
        0,
        0,
        actual_seq_lengths_key=lengths,
        block_table=table,
        layout_query="BSND",
        layout_key="PA_BSND",
        sparse_count=top_k,
        sparse_mode=3,
    )
    return indices.squeeze(2)


@quant_sparse_index.lowering("npu")
def _npu_of_all_heads(args: QuantSparseIndex) -> Any:
    """The same with heads of zeros, which add nothing to a score."""
    missing = ONLY_HEADS - args.q.shape[2]
    if missing <= 0:
        return _npu(args)
    q, weights = torch.nn.functional.pad(args.q, (0, 0, 0, missing)), torch.nn.functional.pad(args.weights, (0, missing))
    return _npu(args._replace(q=q, weights=weights))


@quant_sparse_index.cost
def _cost(args: QuantSparseIndex) -> Cost:
    q, weights, cache, scale, page_table, num_computed_tokens, query_lens, top_k = args
    (B, Q, heads, D), keys = q.shape, page_table.shape[1] * cache.shape[1]
    read = nbytes(q, weights, page_table, num_computed_tokens, query_lens) + B * keys * (D + scale.dtype.itemsize)
    return Cost(2 * B * Q * heads * keys * (D + 1), read, 4 * B * Q * top_k)
