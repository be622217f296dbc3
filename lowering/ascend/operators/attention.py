"""Attention over paged caches.

Semantics: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ....graphs.errors import LoweringError
from . import attention_rules as rules
from . import trials, work
from .call import form
from .checks import FLOATS, refuse_options, require, require_shape, undefined
from .node import Node
from .record import NpuOperator, TorchForm

MASK_SIZE = 2048


@functools.cache
def causal_mask() -> torch.Tensor:
    """The compressed mask [2048, 2048] that causal attention takes for all lengths: true above the diagonal."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1)


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    key_antiquant_scale: torch.Tensor | None = None,
    value_antiquant_scale: torch.Tensor | None = None,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over paged caches: query i of Lq sees keys j <= i + Lkv - Lq (sparse_mode 3), or all (sparse_mode 0).

    Without a page table keys lie where queries do, in BSND and sparse_mode 0.

    A key that a query does not see does not affect its result, even if it is NaN.

    Args:
        query: TND [T, H, D], BSND [B, Q, H, D] or BSH [B, Q, H*D].
        key, value: caches [pages, P, G*D] or [pages, G, P, D], without pages [B, K, G, D]; query head h reads head h // (H/G). Of int8
            where scales are given.
        atten_mask: the compressed mask, `causal_mask()`; None in sparse_mode 0.
        actual_seq_lengths: int64 [B]: TND running sums of query tokens, else query tokens of each sequence (absent: all Q).
        actual_seq_lengths_kv: int64 [B] keys of each sequence.
        block_table: int32 [B, N] pages of each sequence; None where each has its own keys.
        query_rope, key_rope: further channels of queries and keys, laid out as those; values have none.
        key_antiquant_scale, value_antiquant_scale: of int8 caches, for one query of a sequence: of the dtype of query and with a number for
            each of G*D channels (mode 0), or f32 [pages, G, P] (mode 5).

    Returns:
        o like query, and nothing, for sums of softmax. Rows beyond a sequence and rows that see nothing are undefined.
    """
    op = "npu_fused_infer_attention_score"
    refuse_options(op, options, pre_tokens=2**31 - 1, next_tokens=2**31 - 1, inner_precise=1)
    if input_layout not in ("TND", "BSND", "BSH"):
        raise LoweringError(f"{op}: input_layout is {input_layout!r}; legal is 'TND', 'BSND' or 'BSH'")
    _check_mask(op, atten_mask, sparse_mode)
    if block_table is None:
        unread = (query_rope, key_rope, key_antiquant_scale, value_antiquant_scale, actual_seq_lengths)
        if input_layout != "BSND" or sparse_mode or any(each is not None for each in unread):
            raise LoweringError(
                f"{op}: block_table is absent in layout {input_layout} and sparse_mode {sparse_mode}; legal without pages are BSND and 0, "
                "lengths of keys, and neither rotary parts, scales nor lengths of queries"
            )
        return _without_pages(op, query, key, value, actual_seq_lengths_kv, num_heads, scale), torch.empty(0)
    tables = require(op, "block_table", block_table, (torch.int32,), (2,))
    G = num_key_value_heads or num_heads
    keys, values = _pages(op, "key", key, G, block_size), _pages(op, "value", value, G, block_size)
    if key.dtype == torch.int8:
        scales = [(key_antiquant_scale, key_antiquant_mode), (value_antiquant_scale, value_antiquant_mode)]
        keys, values = _dequantised(op, query, (keys, values), scales, input_layout, query_rope)
    flat = require(op, "query", query, FLOATS if key.dtype == torch.int8 else (key.dtype,)).reshape(-1, num_heads, keys.shape[-1])
    if query_rope is None and key_rope is None:
        _check_widths(op, key, num_heads, G, input_layout)
    else:
        rotated = _pages(op, "key_rope", require(op, "key_rope", key_rope, (key.dtype,)), G, block_size)
        queries = require(op, "query_rope", query_rope, (query.dtype,), (query.dim(),)).reshape(-1, num_heads, rotated.shape[-1])
        _check_latent(op, query, num_heads, G, input_layout)
        flat, keys = torch.cat([flat, queries], -1), torch.cat([keys, rotated], -1)
    out = undefined(*flat.shape[:2], values.shape[-1], dtype=query.dtype)
    spans = _spans(op, query, actual_seq_lengths, actual_seq_lengths_kv, input_layout, tables.shape[0])
    for (low, high, length), table in zip(spans, tables, strict=True):
        if length > table.numel() * keys.shape[1]:
            raise LoweringError(f"{op}: {length} keys in a block_table row of {table.numel()} pages of {keys.shape[1]}")
        pages = table[: -(-length // keys.shape[1])].long()
        k, v = (pool[pages].flatten(0, 1)[:length].transpose(0, 1).float() for pool in (keys, values))
        _attend(flat[low:high], k, v, scale, sparse_mode == 3, out[low:high])
    return out.reshape(*query.shape[:-1], -1), torch.empty(0)


_MOST_SCORES = 2**24


def _without_pages(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor | None, H: int, scale: float
) -> torch.Tensor:
    """Every query of a sequence [Q, H, D] over its first keys [K, G, D], in blocks of queries."""
    for name, each in (("key", key), ("value", value)):
        require(op, name, each, (require(op, "query", query, FLOATS, (4,)).dtype,), (4,))
        require_shape(op, name, each, (query.shape[0], key.shape[1], key.shape[2], query.shape[3]))
    lengths = require(op, "actual_seq_lengths_kv", keys, (torch.int64,), (1,)).tolist()
    if query.shape[2] != H or H % key.shape[2] or len(lengths) != len(query) or not all(0 <= n <= key.shape[1] for n in lengths):
        raise LoweringError(f"{op}: num_heads {H}, query {tuple(query.shape)}, key {tuple(key.shape)}, key lengths {lengths}")
    out = undefined(*query.shape, dtype=query.dtype)
    for rows, k, v, length, to in zip(query, key, value, lengths, out, strict=True):
        k, v = (each[:length].transpose(0, 1).float() for each in (k, v))
        for start in range(0, len(rows), most := max(1, _MOST_SCORES // (H * max(length, 1)))):
            _attend(rows[start : start + most], k, v, scale, False, to[start : start + most])
    return out


# Limits of the host tiling of ops-transformer@c29bc10, for a page table and no rotary part beside the query: widths of TND in
# prompt_flash_attention_tiling.cpp (CheckInputShapeWhenLayoutIsTND); heads, groups and widths of the others there (NLIMIT, DLIMIT,
# checkPAKeyValueDimsWhenBBH) and in incre_flash_attention_tiling_check.cpp. Its page sizes (multiples of 128, for one query of 16) are left
# to the check of emitted graphs: graphs of small models have smaller pages.
_TND_WIDTHS = (64, 128, 192)
_MOST_HEADS, _LARGEST_GROUP, _WIDEST, _WIDEST_ROW = 256, 64, 512, 65535


def _check_widths(op: str, key: torch.Tensor, H: int, G: int, layout: str) -> None:
    row = key.shape[-1] if key.dim() == 3 else G * key.shape[-1]
    D = row // G
    if layout == "TND" and D not in _TND_WIDTHS:
        raise LoweringError(f"{op}: heads of width {D} in layout TND with a block_table; legal are {_TND_WIDTHS}, or layout BSH or BSND")
    if H % G or H > _MOST_HEADS or H // G > _LARGEST_GROUP or D > _WIDEST or row > _WIDEST_ROW:
        raise LoweringError(
            f"{op}: {H} query heads, {G} key heads of width {D}; legal are at most {_MOST_HEADS} heads, a multiple of the key heads, at "
            f"most {_LARGEST_GROUP} a key head, of width at most {_WIDEST}, and key rows of at most {_WIDEST_ROW}"
        )


# Limits of the host tiling of ops-transformer@c29bc10 beside a rotary part: CheckMlaAttrs in incre_flash_attention_tiling_check.cpp, and
# IsUsingIFA in fused_infer_attention_score_tiling.cpp. Its widths, 512 and 64, are left to the check of emitted graphs, as page sizes are.
_MOST_LATENT_QUERIES, _MOST_LATENT_HEADS = 16, 128


def _check_latent(op: str, query: torch.Tensor, H: int, G: int, layout: str) -> None:
    many = layout != "TND" and query.shape[1] > _MOST_LATENT_QUERIES
    if G != 1 or H & (H - 1) or H > _MOST_LATENT_HEADS or many:
        raise LoweringError(
            f"{op}: {H} query heads, {G} key heads, query {tuple(query.shape)} {layout} with query_rope; legal are a power of two up to "
            f"{_MOST_LATENT_HEADS} query heads, one key head, and up to {_MOST_LATENT_QUERIES} queries a sequence in BSH and BSND"
        )


_CHANNELS, _TOKENS_IN_PAGES = 0, 5


def _dequantised(
    op: str,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: list[tuple[torch.Tensor | None, int]],
    layout: str,
    rope: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches [pages, P, G, D] of int8 times their scales, f32.

    Legal over pages is one query of a sequence, without rotary parts (Ascend/op-plugin@517f2e7,
    torch_npu-npu_fused_infer_attention_score.md); shapes and dtypes of scales are those of incre_flash_attention_tiling.cpp and
    incre_flash_attention_tiling_check.cpp of ops-transformer@c29bc10.
    """
    if layout not in ("BSH", "BSND") or query.shape[1] != 1 or rope is not None:
        raise LoweringError(
            f"{op}: keys are int8, query {tuple(query.shape)} in layout {layout}{', with query_rope' if rope is not None else ''}; legal "
            "over int8 pages is one query of a sequence in BSH or BSND, without query_rope"
        )
    pages, P, G, D = caches[0].shape
    results = []
    for cache, (scale, mode), name in zip(caches, scales, ("key", "value"), strict=True):
        if mode not in (_CHANNELS, _TOKENS_IN_PAGES) or mode != scales[0][1]:
            raise LoweringError(f"{op}: {name}_antiquant_mode is {mode}; legal are {_CHANNELS} and {_TOKENS_IN_PAGES}, the same for both")
        if mode == _CHANNELS:
            given = require(op, f"{name}_antiquant_scale", scale, (query.dtype,))
            if tuple(given.shape) not in ((1, G, 1, D), (1, 1, G, D), (1, G, D), (1, G * D)):
                raise LoweringError(f"{op}: {name}_antiquant_scale is {tuple(given.shape)}; legal is {(1, G * D)}, or with {G} heads apart")
            factor = given.reshape(G, D)
        else:
            given = require(op, f"{name}_antiquant_scale", scale, (torch.float32,))
            require_shape(op, f"{name}_antiquant_scale", given, (pages, G, P))
            factor = given.transpose(1, 2)[..., None]
        results.append(cache.float() * factor.float())
    return results[0], results[1]


def _pages(op: str, name: str, cache: torch.Tensor, G: int, block_size: int) -> torch.Tensor:
    """[pages, P, G, D] of either legal form."""
    require(op, name, cache, (*FLOATS, torch.int8), (3, 4))
    pages = cache.unflatten(-1, (G, -1)) if cache.dim() == 3 else cache.transpose(1, 2)
    if (pages.shape[1], pages.shape[2]) != (block_size, G):
        raise LoweringError(f"{op}: {name} {tuple(cache.shape)} against block_size {block_size} and {G} heads; legal is [pages, P, G*D]")
    return pages


def _spans(
    op: str, query: torch.Tensor, ends: torch.Tensor | None, keys: torch.Tensor | None, layout: str, B: int
) -> Iterator[tuple[int, int, int]]:
    """First and last+1 row of each sequence among the flattened queries, and its number of keys."""
    lengths = require(op, "actual_seq_lengths_kv", keys, (torch.int64,), (1,)).tolist()
    if layout == "TND":
        last = require(op, "actual_seq_lengths", ends, (torch.int64,), (1,)).tolist()
        rows = list(zip([0, *last[:-1]], last, strict=True))
        legal = last[-1] <= query.shape[0] and all(low <= high for low, high in rows)
    else:
        counts = [query.shape[1]] * B if ends is None else ends.tolist()
        rows = [(i * query.shape[1], i * query.shape[1] + n) for i, n in enumerate(counts)]
        legal = len(counts) == query.shape[0] and all(0 <= n <= query.shape[1] for n in counts)
    if not legal or len(rows) != B or len(lengths) != B:
        raise LoweringError(f"{op}: queries {tuple(query.shape)} {layout}, {B} block_table rows, query rows {rows}, key lengths {lengths}")
    return ((low, high, length) for (low, high), length in zip(rows, lengths, strict=True))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, out: torch.Tensor) -> None:
    """One sequence: q [Lq, H, D], k [G, Lkv, D] f32, v [G, Lkv, Dv] f32; fills the rows of out that see a key."""
    Lq, Lkv, per = q.shape[0], k.shape[1], q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(per, 0), v.repeat_interleave(per, 0)
    visible = torch.ones(Lq, Lkv, dtype=torch.bool)
    visible = visible.tril(Lkv - Lq) if causal else visible
    live = visible.any(-1)
    score = (q.float().transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~visible, float("-inf"))[:, live]
    # 0 * NaN is NaN: sum NaN values as zeros, then mark the queries that see one.
    mean = score.softmax(-1) @ torch.where(v.isfinite(), v, 0.0)
    poisoned = visible[live].float() @ (~v.isfinite()).float() > 0
    out[live] = mean.masked_fill(poisoned, float("nan")).transpose(0, 1).to(out.dtype)


# Masks that were found to be causal, with their version: comparing four million values takes longer than a small model's attention.
_causal: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _is_causal(mask: torch.Tensor) -> bool:
    if _causal.get(mask) == mask._version:
        return True
    if mask.shape != causal_mask().shape or not torch.equal(mask.bool(), causal_mask()):
        return False
    _causal[mask] = mask._version
    return True


def _check_mask(op: str, mask: torch.Tensor | None, sparse_mode: int) -> None:
    if sparse_mode == 0 and mask is None:
        return
    actual = require(op, "atten_mask", mask, (torch.bool, torch.int8, torch.uint8), (2,))
    if sparse_mode != 3 or not _is_causal(actual):
        raise LoweringError(
            f"{op}: sparse_mode {sparse_mode}, atten_mask {tuple(actual.shape)}; legal is 0 and none, or 3 and the compressed one: "
            f"[{MASK_SIZE}, {MASK_SIZE}], true above the diagonal"
        )


Lengths = Sequence[int] | torch.Tensor | None
"""A list of the host; a tensor where all ranks are emulated in one process and nobody reads it back (tools/prove)."""


def with_host_lengths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: Lengths = None,
    actual_seq_lengths_kv: Lengths = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over paged caches, see `kernels_npu_fused_infer_attention_score`, which takes its lengths as tensors."""
    return npu_fused_infer_attention_score(
        query,
        key,
        value,
        actual_seq_lengths=_tensor(actual_seq_lengths),
        actual_seq_lengths_kv=_tensor(actual_seq_lengths_kv),
        **options,
    )


def _tensor(lengths: Lengths) -> torch.Tensor | None:
    return torch.tensor(lengths, dtype=torch.int64) if isinstance(lengths, list | tuple) else lengths  # type: ignore[return-value]


def _attention_work(op: Node, facts: work.Facts) -> work.Work:
    """Paged attention reads the cached keys and values of each request once; of latent keys the values are a part. Without pages every
    query sees every key."""
    query, key = facts.types[op.tensor("query")], facts.types[op.tensor("key0")]
    heads = op.attributes.get("num_heads", 0)
    kv_heads = op.attributes.get("num_key_value_heads", 0) or heads
    table = facts.types.get(op.find("block_table"))
    block = op.attributes.get("block_size", 0) or 128
    if table is None:
        batch, most = key.shape[0], key.elements // max(key.shape[0], 1)
        width = key.shape[-1] if len(key.shape) == 4 else key.shape[-1] // kv_heads
        most //= kv_heads * width
    else:
        batch, most, width = table.shape[0], table.shape[1] * block, key.elements // (key.shape[0] * block * kv_heads)
    tokens = query.elements // (heads * width)
    new = tokens / max(batch, 1)
    keys = min(max(facts.context, new), most)
    rotary = facts.types.get(op.find("key_rope"))
    entry = 2 * kv_heads * width if rotary is None else width + rotary.shape[-1]
    scales = facts.types.get(op.find("key_antiquant_scale"))
    # Scales in pages are of a token and head; those of channels are read once.
    beside = 2 * kv_heads * 4 if scales is not None and len(scales.shape) == 3 else 0
    streamed = 1.0 * batch * keys * (entry * key.nbytes / max(key.elements, 1) + beside)
    seen = keys - new / 2 if table is not None else keys
    ops = 2.0 * tokens * heads * (2 * width + (rotary.shape[-1] if rotary else 0)) * max(seen, 1.0)
    moved = work.bytes_moved(facts, work.whole_tensors(facts, [op.tensor("query"), *work.results_of(op, facts)]))
    # Long queries are split into blocks of rows as well.
    tasks = int(batch * kv_heads * max(1, new * heads / kv_heads // 128))
    return replace(moved, streamed_bytes=streamed, attention_ops=ops, tasks=tasks)


OPERATORS = (
    NpuOperator(
        ("FusedInferAttentionScore",),
        torch=(
            TorchForm("air.npu_fused_infer_attention_score.default", npu_fused_infer_attention_score),
            # torch_npu captures both as tasks that are updated before each replay: torch_npu/npu/_npugraph_handlers/ifa_handler.py, 2.13.0.
            TorchForm(
                "npu.npu_fused_infer_attention_score.default",
                with_host_lengths,
                host_lists=("actual_seq_lengths", "actual_seq_lengths_kv"),
            ),
            TorchForm("npu.npu_fused_infer_attention_score_v2.default", host_lists=("actual_seq_qlen", "actual_seq_kvlen")),
        ),
        run=form(
            npu_fused_infer_attention_score,
            "query key0 value0",
            "atten_mask actual_seq_lengths actual_seq_lengths_kv block_table query_rope key_rope key_antiquant_scale value_antiquant_scale",
            attributes={
                "num_heads": 1,
                "scale": 1.0,
                "pre_tokens": 2**31 - 1,
                "next_tokens": 2**31 - 1,
                "input_layout": "BSH",
                "num_key_value_heads": 0,
                "sparse_mode": 0,
                "inner_precise": 0,
                "block_size": 0,
                "softmax_lse_flag": False,
                "key_antiquant_mode": 0,
                "value_antiquant_mode": 0,
            },
            legal={"antiquant_mode": 0, "query_quant_mode": 0, "pse_type": 0, "out_dtype": 0},
        ),
        widens=True,
        work=_attention_work,
        # Constants there would be the lengths of the trace, in every step.
        lengths=(5, 6),
        trial=trials.Trial(0, "lengths", "attention", layer="lengths", corners=trials.padded_rows),
        rules=(
            *(rules.widths_of_packed_tokens, rules.lengths_on_the_device, rules.paged_cache, rules.mask, rules.head_groups),
            *(rules.latent_keys, rules.int8_pages, rules.int8_widths, rules.no_mask_over_pages, rules.mask_or_pages),
        ),
    ),
)
