"""Attention over a paged KV pool."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import products
from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes


class PagedAttention(NamedTuple):
    """Operands of `paged_attention`; query head h reads key head h // (H / G)."""

    q: Tensor  # [B, Q, H, D]
    k_cache: Tensor  # [pages, P, G, D] with H a multiple of G
    v_cache: Tensor  # [pages, P, G, D]
    page_table: Tensor  # [B, N] page ids; key j of row b lies in page `page_table[b, j // P]` at offset `j % P`
    num_computed_tokens: Tensor  # [B] position of each row's first query; query t sees keys 0..starts+t
    query_lens: Tensor  # [B] valid queries of each row; values at and beyond starts + lengths are never read
    scale: float  # multiplies the scores


paged_attention = Primitive("paged_attention", PagedAttention, factors="b _ h _, _ _ h _, _ _ h _, b _, b, b -> b _ h _", like="q")


def attend(q: Tensor, k: Tensor, v: Tensor, num_computed_tokens: Tensor, query_lens: Tensor, scale: float) -> Tensor:
    """Attention of q [B,Q,H,D] over gathered k, v [B,K,G,D]; token t of row b sees keys up to `num_computed_tokens[b] + t`.

    Query heads of one key head are folded into rows: one matrix product per key head, no repeated keys. Values beyond a row's last
    visible key are replaced by zero, since 0 * NaN from a page that was never written would be NaN. So are NaN weights of padding
    tokens: a bfloat16 product on AMX reads past the end of a row whose length is no multiple of 32, into the next token's.
    """
    B, Q, H, D = q.shape
    K, G = k.shape[1], k.shape[2]
    key = torch.arange(K, dtype=torch.int32, device=q.device)
    token = torch.arange(Q, dtype=torch.int32, device=q.device)
    hidden = key[None, None, :] > (num_computed_tokens[:, None] + token[None, :])[:, :, None]
    live = key[None, :] < (num_computed_tokens + query_lens)[:, None]
    v = torch.where(live[:, :, None, None], v, torch.zeros((), dtype=v.dtype, device=v.device))
    rows = q.view(B, Q, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B * G, -1, D)
    keys = k.permute(0, 2, 3, 1).reshape(B * G, D, K)
    scores = products.bmm(rows, keys).float().view(B, G, H // G, Q, K) * scale
    scores = torch.where(hidden[:, None, None], torch.full((), float("-inf"), device=q.device), scores)
    valid = (token[None, :] < query_lens[:, None])[:, None, None, :, None]
    weights = torch.softmax(scores, -1)
    weights = torch.where(valid, weights, weights.nan_to_num(0.0)).to(v.dtype).view(B * G, -1, K)
    out = products.bmm(weights, v.permute(0, 2, 1, 3).reshape(B * G, K, D))
    return out.view(B, G, H // G, Q, D).permute(0, 3, 1, 2, 4).contiguous().view(B, Q, H, D)


def _gather(cache: Tensor, page_table: Tensor) -> Tensor:
    B, N = page_table.shape
    pages = cache.index_select(0, page_table.reshape(-1))
    return pages.view(B, N * cache.shape[1], *cache.shape[2:])


@paged_attention.reference
def paged_attention_reference(args: PagedAttention) -> Tensor:
    """Grouped-query attention, causal over cached keys; this step's keys are in the pool already.

    Returns:
        [B, Q, H, D], dtype of q. Softmax in f32.
    """
    q, k_cache, v_cache, page_table, num_computed_tokens, query_lens, scale = args
    longest = int((num_computed_tokens + query_lens).max())
    pages = page_table[:, : max(1, -(-longest // k_cache.shape[1]))]
    return attend(q, _gather(k_cache, pages), _gather(v_cache, pages), num_computed_tokens, query_lens, scale)


_in_place = Native("npuc_attention", paged_attention.schema, paged_attention.rule("abstract")).op


@paged_attention.lowering("inductor")
def _cpu(args: PagedAttention) -> Any:
    """A kernel that reads pages in place (lowering/cpp/paged_attention.cpp).

    Contexts are known by value only, and a request of 60 tokens should not pay for a page table of 1,024.
    """
    return _in_place(*args)


# The one of the kernel's layouts that takes any head width up to 512 over a page table, in every release, with lengths that only the
# device knows. TND takes widths 64, 128 and 192, and no such lengths (ops-transformer@c29bc10,
# prompt_flash_attention_tiling.cpp: CheckInputShapeWhenLayoutIsTND, "not support tiling_schedule_optimize").
NPU_LAYOUT = "BSH"

# Side of the causal mask the kernel asks for, whatever the lengths are: it looks at it through a window.
_MASK = 2048


@paged_attention.lowering("npu")
def over_pages_on_npu(args: PagedAttention) -> Any:
    """The fused kernel over the page table; lengths are operands, so one graph serves all of them.

    Its mask is aligned to the last key: query t of Q sees keys up to `Lkv - Q + t`. With Lkv = starts + Q that is the reference
    for every row, however many of its queries are valid; a row of padding sees Q keys of the null page. Keys at and beyond
    starts + lengths weigh nothing for valid queries but are read, so pools must hold finite values throughout.
    """
    q, k_cache, v_cache, page_table, num_computed_tokens, _, scale = args
    B, Q, H, D = q.shape
    pages, P, G, _ = k_cache.shape
    mask, table = None, page_table
    if Q > 1:
        row = torch.arange(_MASK, dtype=torch.int32, device=q.device)
        mask = row[None, :] > row[:, None]
        # Invalid queries at the end of a full context have keys beyond the table; the kernel finds the null page for them.
        table = torch.cat([page_table, page_table.new_zeros(B, -(-(Q - 1) // P))], 1)
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        q.view(B, Q, H * D),
        k_cache.view(pages, P, G * D),
        v_cache.view(pages, P, G * D),
        atten_mask=mask,
        block_table=table,
        actual_seq_lengths_kv=(num_computed_tokens + Q).to(torch.int64),
        num_heads=H,
        num_key_value_heads=G,
        scale=scale,
        input_layout=NPU_LAYOUT,
        sparse_mode=0 if mask is None else 3,
        block_size=P,
    )
    return out.view(B, Q, H, D)


@paged_attention.cost
def _cost(args: PagedAttention) -> Cost:
    q, k_cache, _, page_table, num_computed_tokens, query_lens, _ = args
    keys = page_table.shape[1] * k_cache.shape[1]
    kv = 2 * q.shape[0] * keys * k_cache.shape[2] * k_cache.shape[3] * k_cache.dtype.itemsize
    return Cost(4 * q.numel() * keys, nbytes(q, page_table, num_computed_tokens, query_lens) + kv, nbytes(q))
