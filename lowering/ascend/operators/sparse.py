"""CPU kernels of the NPU's attention over chosen keys: the indexer that chooses them, and the attention.

Semantics: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ....graphs.errors import LoweringError
from . import value_rules as values
from . import work
from .call import form
from .checks import FLOATS, refuse_options, require, require_shape, undefined
from .node import Node
from .record import NpuOperator, TorchForm

LAST = 2**63 - 1
"""Tokens before and behind a query that it sees: all."""
_MOST_CHOSEN, _MOST_INDEX_HEADS, _MOST_HEADS = 2048, 64, 128


def npu_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the keys with the largest `sum_h weights[h] * relu(q[h] . k)`, up to `i + Lkv - Lq` for query i (sparse_mode 3).

    Args:
        query: [B, Q, I, D]; weights: [B, Q, I].
        key: cache [pages, P, 1, D].
        actual_seq_lengths_query: int32 [B] queries of each sequence; absent: all Q.
        actual_seq_lengths_key: int32 [B] keys of each sequence.
        block_table: int32 [B, N] pages of each sequence.

    Returns:
        int32 [B, Q, 1, sparse_count], -1 behind the keys that a query sees; and nothing, for the scores.
    """
    op = "npu_lightning_indexer"
    refuse_options(op, options, pre_tokens=LAST, next_tokens=LAST, return_value=False)
    check_layout(op, layout_query, layout_key, sparse_mode)
    B, Q, heads, D = require(op, "query", query, (key.dtype,), (4,)).shape
    require_shape(op, "weights", require(op, "weights", weights, (query.dtype, torch.float32)), (B, Q, heads))
    require_shape(op, "key", require(op, "key", key, FLOATS, (4,)), (*key.shape[:2], 1, D))
    if heads > _MOST_INDEX_HEADS or not 0 < sparse_count <= _MOST_CHOSEN:
        raise LoweringError(
            f"{op}: {heads} heads, sparse_count {sparse_count}; legal are up to {_MOST_INDEX_HEADS}, and 1 to {_MOST_CHOSEN}"
        )
    indices = torch.full((B, Q, 1, sparse_count), -1, dtype=torch.int32)
    for b, (new, length, pages) in enumerate(rows_of(op, Q, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table)):
        keys = key[pages].flatten(0, 2)[:length].float()
        # Of any strides, so that equal values give equal sums.
        asked, shares = (part[b, :new].float().contiguous() for part in (query, weights))
        scores = torch.einsum("tid,kd->tik", asked, keys).relu()
        best_of_rows(indices[b, :new, 0], torch.einsum("ti,tik->tk", shares, scores), length - new)
    return indices, torch.empty(0, dtype=query.dtype)


def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention over latents at chosen positions, further up to `i + Lkv - Lq` for query i (sparse_mode 3).

    Args:
        query: [B, Q, H, L]; query_rope: [B, Q, H, R].
        key: cache [pages, P, 1, L] of latents, which are the values too; key_rope: [pages, P, 1, R].
        sparse_indices: int32 [B, Q, 1, K], -1 behind the chosen positions.

    Returns:
        o like query, undefined where a query sees nothing; and two results that are empty.
    """
    op = "npu_sparse_flash_attention"
    refuse_options(op, options, pre_tokens=LAST, next_tokens=LAST, return_softmax_lse=False)
    check_layout(op, layout_query, layout_kv, sparse_mode)
    B, Q, H, _ = require(op, "query", query, (key.dtype,), (4,)).shape
    rotated = require(op, "key_rope", key_rope, (key.dtype,), (4,))
    require_shape(op, "query_rope", require(op, "query_rope", query_rope, (query.dtype,), (4,)), (B, Q, H, rotated.shape[3]))
    check_chosen(op, sparse_indices, B, Q)
    check_attention(op, attention_mode, sparse_block_size, H, key, value)

    def entries(pages: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        latents, rotary = (cache[pages].flatten(0, 2)[:length].float() for cache in (key, rotated))
        return latents, rotary

    counted = rows_of(op, Q, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table)
    queries = torch.cat([query, query_rope], -1)  # type: ignore[list-item]
    return mixed_rows(queries, query.shape[3], entries, sparse_indices, counted, scale_value), torch.empty(0), torch.empty(0)


def check_chosen(op: str, chosen: torch.Tensor, B: int, Q: int) -> None:
    """Refuses other than positions [B, Q, 1, K]."""
    require_shape(op, "sparse_indices", require(op, "sparse_indices", chosen, (torch.int32,), (4,)), (B, Q, 1, chosen.shape[-1]))


def check_attention(op: str, mode: int, block: int, H: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuses values that are not the keys, blocks of several tokens, and other numbers of heads."""
    same = value.shape == key.shape and (value.data_ptr() == key.data_ptr() or torch.equal(value.nan_to_num(), key.nan_to_num()))
    if mode != 2 or block != 1 or not same or H & (H - 1) or H > _MOST_HEADS:
        raise LoweringError(
            f"{op}: attention_mode {mode}, sparse_block_size {block}, {H} heads, values {'' if same else 'not '}the "
            f"keys; legal are 2, 1, a power of two up to {_MOST_HEADS}, and values that are the keys"
        )


def mixed_rows(
    query: torch.Tensor,
    L: int,
    entries: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    chosen: torch.Tensor,
    counted: list[tuple[int, int, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """Attention of queries [B, Q, H, L + R] over chosen positions.

    Args:
        entries: pages and number of keys -> their latents and rotary parts, in float32.
        counted: what `rows_of` gave.
    """
    out = undefined(*query.shape[:3], L, dtype=query.dtype)
    for b, (new, length, pages) in enumerate(counted):
        latents, rotary = entries(pages, length)
        places = chosen[b, :new, 0].long()
        read = (places >= 0) & (places <= torch.arange(length - new, length)[:, None])
        places = torch.where(read, places, 0)
        scores = torch.einsum("thd,tkd->thk", query[b, :new].float().contiguous(), torch.cat([latents, rotary], -1)[places]) * scale
        shares = torch.where(read[:, None], scores, float("-inf")).softmax(-1)
        # What is not read may be NaN, and so may the shares of a query that reads nothing.
        mixed = torch.einsum("thk,tkl->thl", shares, torch.where(read[..., None], latents[places], 0.0))
        some = read.any(-1)
        out[b, :new][some] = mixed[some].to(out.dtype)
    return out


def best_of_rows(indices: torch.Tensor, scores: torch.Tensor, before: int) -> None:
    """Writes to indices [new, K] the best of scores [new, keys] that a query sees, `before` of which lie before the first query."""
    new, keys = scores.shape
    seen = torch.where(torch.arange(keys) <= before + torch.arange(new)[:, None], scores, float("-inf"))
    best = seen.topk(min(indices.shape[1], keys))
    indices[:, : best.indices.shape[1]] = torch.where(best.values > float("-inf"), best.indices.int(), -1)


def check_layout(op: str, query: str, keys: str, sparse_mode: int) -> None:
    """Refuses other than rows of queries over pages, causal."""
    if (query, keys, sparse_mode) != ("BSND", "PA_BSND", 3):
        raise LoweringError(
            f"{op}: layouts {query!r} and {keys!r}, sparse_mode {sparse_mode}; the CPU kernel knows 'BSND', 'PA_BSND' and 3"
        )


def rows_of(
    op: str, Q: int, cache: torch.Tensor, queries: torch.Tensor | None, keys: torch.Tensor | None, table: torch.Tensor | None
) -> list[tuple[int, int, torch.Tensor]]:
    """Of each sequence its number of queries, its number of keys, and the pages of those."""
    tables = require(op, "block_table", table, (torch.int32,), (2,))
    lengths = require(op, "actual_seq_lengths of keys", keys, (torch.int32,), (1,)).tolist()
    counts = [Q] * len(lengths) if queries is None else require(op, "actual_seq_lengths_query", queries, (torch.int32,), (1,)).tolist()
    P = cache.shape[1]
    if len(lengths) != len(tables) or len(counts) != len(tables) or any(n > tables.shape[1] * P for n in lengths):
        raise LoweringError(f"{op}: keys {lengths} and queries {counts} of {len(tables)} rows of {tables.shape[1]} pages of {P}")
    return [(new, length, row[: -(-length // P)].long()) for new, length, row in zip(counts, lengths, tables, strict=True)]


def _most_keys(op: Node, facts: work.Facts) -> tuple[int, float]:
    """Sequences, and the keys of each."""
    query, table, pages = (facts.types[op.tensor(name)] for name in ("query", "block_table", "key"))
    return query.shape[0], float(min(max(facts.context, query.shape[1]), table.shape[1] * pages.shape[1]))


def _entry(op: Node, facts: work.Facts, *pools: str) -> float:
    """Bytes of a token in those of the pools that there are."""
    types = [facts.types[tensor] for name in pools if (tensor := op.find(name))]
    return sum(pool.nbytes / (pool.shape[0] * pool.shape[1]) for pool in types)


def _near(op: Node, facts: work.Facts, *names: str) -> work.Work:
    """What is moved of operands that are no pools, and of results."""
    return work.bytes_moved(facts, work.whole_tensors(facts, [*filter(None, map(op.find, names)), *work.results_of(op, facts)]))


def index_work(op: Node, facts: work.Facts) -> work.Work:
    """Every query multiplies all keys that it sees, head by head; the vector unit weighs and adds the scores of heads.

    Both run at the rates of attention, integers at twice that of floats: assumed, no profile of an indexer is public.
    """
    query, (B, keys) = facts.types[op.tensor("query")], _most_keys(op, facts)
    _, Q, heads, D = query.shape
    scores = B * Q * heads * max(keys - Q / 2, 1.0)
    moved = _near(op, facts, "query", "query_dequant_scale", "weights")
    streamed, tasks = B * keys * _entry(op, facts, "key", "key_dequant_scale"), B * max(1, Q * heads // 128)
    ops = scores * D * (1.0 if query.dtype == "i8" else 2.0)
    return replace(moved, streamed_bytes=streamed, tasks=tasks, attention_ops=ops, vector_ops=3.0 * scores)


def sparse_work(op: Node, facts: work.Facts) -> work.Work:
    """Every query reads the keys that it chose: from the cache, if that holds all keys of the sequences, which then are read once.

    Rows of bytes have their rotary parts in them, as queries then do, and the vector unit widens their latents.
    """
    (_, Q, H, width), (B, keys) = facts.types[op.tensor("query")].shape, _most_keys(op, facts)
    chosen, latent = min(facts.types[op.tensor("sparse_indices")].shape[-1], keys), facts.types[f"{op.name}:0"].shape[-1]
    width += facts.types[op.tensor("query_rope")].shape[-1] if op.find("query_rope") else 0
    entry, widened = _entry(op, facts, "key", "key_rope"), facts.types[op.tensor("key")].dtype == "i8"
    read, once = B * Q * chosen * entry, B * keys * entry
    moved = _near(op, facts, "query", "query_rope", "sparse_indices")
    streamed = min(read, once) if once <= facts.cache_bytes else read
    return replace(
        moved,
        cache_bytes=moved.cache_bytes + read - streamed,
        streamed_bytes=streamed,
        tasks=B * Q,
        attention_ops=2.0 * B * Q * H * chosen * (width + latent),
        vector_ops=2.0 * B * Q * chosen * latent if widened else 0.0,
    )


OPERATORS = (
    NpuOperator(
        ("LightningIndexer",),
        torch=(TorchForm("npu.npu_lightning_indexer.default", npu_lightning_indexer, values=values.indexed_keys),),
        run=form(
            npu_lightning_indexer,
            "query key weights",
            "actual_seq_lengths_query actual_seq_lengths_key block_table",
            attributes={"layout_query": "BSND", "layout_key": "BSND", "sparse_count": 2048, "sparse_mode": 3},
            legal={"pre_tokens": LAST, "next_tokens": LAST, "return_values": False},
        ),
        widens=True,
        work=index_work,
    ),
    NpuOperator(
        ("SparseFlashAttention",),
        torch=(
            TorchForm(
                "npu.npu_sparse_flash_attention.default",
                npu_sparse_flash_attention,
                index=values.Index("sparse_indices", values.keys_of_pages, least=-1),
            ),
        ),
        run=form(
            npu_sparse_flash_attention,
            "query key value sparse_indices",
            "block_table actual_seq_lengths_query actual_seq_lengths_kv query_rope key_rope",
            attributes={
                "scale_value": None,
                "sparse_block_size": 1,
                "layout_query": "BSND",
                "layout_kv": "BSND",
                "sparse_mode": 3,
                "attention_mode": 0,
            },
            legal={"pre_tokens": LAST, "next_tokens": LAST, "return_softmax_lse": False},
        ),
        widens=True,
        work=sparse_work,
    ),
)
