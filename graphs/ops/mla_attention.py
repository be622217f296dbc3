"""Multi-head latent attention over a paged pool of latent keys, which all query heads share."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import products
from ..primitive import Cost, Primitive, nbytes


class MlaAttention(NamedTuple):
    """Operands of `mla_attention`. A key is a latent and a rotated part, and a value is the latent alone.

    Queries come in that space: the projection that makes a head's keys of latents is absorbed into its queries, and the one that makes
    its values is applied to the result (arXiv:2405.04434).
    """

    q: Tensor  # [B, Q, H, L]
    q_rope: Tensor  # [B, Q, H, R]
    cache: Tensor  # [pages, P, 1, L] latents
    rope_cache: Tensor  # [pages, P, 1, R]
    page_table: Tensor  # [B, N] page ids; key j of row b lies in page `page_table[b, j // P]` at offset `j % P`
    num_computed_tokens: Tensor  # [B] position of each row's first query; query t sees keys 0..starts+t
    query_lens: Tensor  # [B] valid queries of each row; values at and beyond starts + lengths are never read
    scale: float  # multiplies the scores


mla_attention = Primitive("mla_attention", MlaAttention, factors="b _ h _, b _ h _, _ _ _ _, _ _ _ _, b _, b, b -> b _ h _", like="q")


@mla_attention.reference
def mla_attention_reference(args: MlaAttention) -> Tensor:
    """Attention of every head over the same keys, causal over cached ones; this step's keys are in the pool already.

    Returns:
        [B, Q, H, L], dtype of q: weighted sums of latents. Softmax in f32.
    """
    longest = int((args.num_computed_tokens + args.query_lens).max())
    return attend(args._replace(page_table=args.page_table[:, : max(1, -(-longest // args.cache.shape[1]))]))


@mla_attention.lowering("inductor")
def _whole_table(args: MlaAttention) -> Tensor:
    """The same over all pages of the table: a compiled graph cannot depend on the values of lengths."""
    return attend(args)


def attend(args: MlaAttention, chosen: Tensor | None = None) -> Tensor:
    """The same over the whole page table; of keys that a query sees only those that `chosen` [B, Q, N*P] marks, if it is given.

    Values beyond a row's last visible key are replaced by zero, since 0 * NaN from a page that was never written would be NaN; so are
    NaN weights of padding tokens, as in `paged_attention`.
    """
    B, Q, H, _ = args.q.shape
    latents, rotated = (gathered(cache, args.page_table) for cache in (args.cache, args.rope_cache))
    key = torch.arange(latents.shape[1], dtype=torch.int32, device=args.q.device)
    token = torch.arange(Q, dtype=torch.int32, device=args.q.device)
    hidden = key[None, None, :] > (args.num_computed_tokens[:, None] + token[None, :])[:, :, None]
    hidden = hidden if chosen is None else hidden | ~chosen
    keys = torch.cat([latents, rotated], -1).transpose(1, 2)
    scores = products.bmm(torch.cat([args.q, args.q_rope], -1).view(B, Q * H, -1), keys).float().view(B, Q, H, -1) * args.scale
    scores = torch.where(hidden[:, :, None], torch.full((), float("-inf"), device=scores.device), scores)
    valid = (token[None, :] < args.query_lens[:, None])[:, :, None, None]
    weights = torch.softmax(scores, -1)
    weights = torch.where(valid, weights, weights.nan_to_num(0.0)).to(latents.dtype)
    live = key[None, :] < (args.num_computed_tokens + args.query_lens)[:, None]
    values = torch.where(live[:, :, None], latents, torch.zeros((), dtype=latents.dtype, device=latents.device))
    return products.bmm(weights.view(B, Q * H, -1), values).view(args.q.shape).to(args.q.dtype)


def gathered(cache: Tensor, page_table: Tensor) -> Tensor:
    """Entries of each row's pages in order of position: [pages, P, 1, D] and [B, N] -> [B, N*P, D]."""
    B, N = page_table.shape
    return cache.index_select(0, page_table.reshape(-1)).view(B, N * cache.shape[1], cache.shape[-1])


MOST_QUERIES = 16
"""Queries of one row that the NPU's kernel takes beside a rotary part, for latents over pages in BSH
(IsUsingIFA in fused_infer_attention_score_tiling.cpp of hicann/ops-transformer, c29bc10)."""

# Side of the causal mask the kernel asks for, whatever the lengths are.
_MASK = 2048


@mla_attention.lowering("npu")
def _npu(args: MlaAttention) -> Any:
    """The fused kernel over the page table, as in `paged_attention`. A longer row becomes several of `MOST_QUERIES` queries over the same
    pages, each with its own number of keys: they are aligned to the last key, so the result is the same."""
    q, q_rope, cache, rope_cache, table, num_computed_tokens, _, scale = args
    B, Q, H, L = q.shape
    R, P = q_rope.shape[-1], cache.shape[1]
    each = min(Q, MOST_QUERIES)
    parts = -(-Q // each)
    mask = None
    if Q > 1:
        row = torch.arange(_MASK, dtype=torch.int32, device=q.device)
        mask = row[None, :] > row[:, None]
        # Invalid queries at the end of a full context have keys beyond the table; the kernel finds the null page for them.
        table = torch.cat([table, table.new_zeros(B, -(-(parts * each - 1) // P))], 1)
    lengths = num_computed_tokens + each
    if parts > 1:
        missing = parts * each - Q
        q, q_rope = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x for x in (q, q_rope))
        ends = torch.arange(0, parts * each, each, dtype=torch.int32, device=q.device)
        lengths, table = (lengths[:, None] + ends).reshape(-1), table.repeat_interleave(parts, 0)
    latents = cache.view(-1, P, L)
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        q.reshape(B * parts, each, H * L),
        latents,
        latents,
        atten_mask=mask,
        block_table=table,
        actual_seq_lengths_kv=lengths.to(torch.int64),
        query_rope=q_rope.reshape(B * parts, each, H * R),
        key_rope=rope_cache.view(-1, P, R),
        num_heads=H,
        num_key_value_heads=1,
        scale=scale,
        input_layout="BSH",
        sparse_mode=0 if mask is None else 3,
        block_size=P,
    )
    return out.view(B, parts * each, H, L)[:, :Q].contiguous()


@mla_attention.cost
def _cost(args: MlaAttention) -> Cost:
    q, q_rope, cache, rope_cache, page_table, num_computed_tokens, query_lens, _ = args
    B, Q, H, L = q.shape
    keys, R = page_table.shape[1] * cache.shape[1], q_rope.shape[-1]
    entries = B * keys * (L * cache.dtype.itemsize + R * rope_cache.dtype.itemsize)
    read = nbytes(q, q_rope, page_table, num_computed_tokens, query_lens) + entries
    return Cost(2 * B * Q * H * keys * (2 * L + R), read, nbytes(q))
