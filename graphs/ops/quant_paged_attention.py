"""Attention over a paged KV pool of int8."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes
from .paged_attention import NPU_LAYOUT, PagedAttention, attend, over_pages_on_npu


class QuantPagedAttention(NamedTuple):
    """Operands of `quant_paged_attention` and `static_quant_paged_attention`; those without a comment are as of `paged_attention`."""

    q: Tensor  # [B, Q, H, D]
    k_cache: Tensor  # [pages, P, G, D] int8
    v_cache: Tensor  # [pages, P, G, D] int8
    k_scale: Tensor  # [pages, G, P] f32: of a token's head, in pages beside the keys; static: [G, D] f32, of a channel
    v_scale: Tensor  # likewise of values
    page_table: Tensor  # [B, N]
    num_computed_tokens: Tensor  # [B]
    query_lens: Tensor  # [B]
    scale: float


quant_paged_attention = Primitive(
    "quant_paged_attention", QuantPagedAttention, factors="b _ h _, _ _ h _, _ _ h _, _ h _, _ h _, b _, b, b -> b _ h _"
)
static_quant_paged_attention = Primitive(
    "static_quant_paged_attention", QuantPagedAttention, factors="b _ h _, _ _ h _, _ _ h _, h _, h _, b _, b, b -> b _ h _"
)
_BOTH = (quant_paged_attention, static_quant_paged_attention)


def _abstract(args: QuantPagedAttention) -> Tensor:
    return torch.empty(args.q.shape, dtype=args.q.dtype, device=args.q.device)


def _dequantised(args: QuantPagedAttention, page_table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a page table [B, N] in the dtype of q, each [B * N, P, G, D]: integer times scale, rounded once."""
    pages = page_table.reshape(-1)

    def as_floats(cache: Tensor, scale: Tensor) -> Tensor:
        factor = scale.index_select(0, pages).transpose(1, 2).unsqueeze(-1) if scale.dim() == 3 else scale
        return (cache.index_select(0, pages).float() * factor).to(args.q.dtype)

    return as_floats(args.k_cache, args.k_scale), as_floats(args.v_cache, args.v_scale)


def _over_pages(args: QuantPagedAttention, page_table: Tensor) -> Tensor:
    k, v = (x.view(page_table.shape[0], -1, *x.shape[2:]) for x in _dequantised(args, page_table))
    return attend(args.q, k, v, args.num_computed_tokens, args.query_lens, args.scale)


def quant_paged_attention_reference(args: QuantPagedAttention) -> Tensor:
    """`paged_attention` over keys and values that are integers times their scales.

    Returns:
        [B, Q, H, D], dtype of q. Softmax in f32.
    """
    longest = int((args.num_computed_tokens + args.query_lens).max())
    return _over_pages(args, args.page_table[:, : max(1, -(-longest // args.k_cache.shape[1]))])


def _cpu(args: QuantPagedAttention) -> Tensor:
    """The whole page table, whose size alone is known when the graph is compiled."""
    return _over_pages(args, args.page_table)


MOST_ROWS = 8
"""Most queries of a request that the NPU's kernel takes as requests of one query: as many as a decode step ever verifies."""

# Modes of `key_antiquant_mode`: a scale a channel, and a scale a token and head in pages (Ascend/op-plugin@517f2e7,
# torch_npu-npu_fused_infer_attention_score.md).
_PER_CHANNEL, _PER_TOKEN_AND_HEAD_IN_PAGES = 0, 5


def _npu(args: QuantPagedAttention) -> Any:
    """The fused kernel over int8 pages takes one query of a request (op-plugin@517f2e7: page attention, Q_S = 1). The few queries of a
    decode step become requests of one query each, which share their pages; more are attended to over pages that are dequantised before
    (as `_forward_c8_chunked_prefill` of vllm-ascend@182b75e does)."""
    q, k_cache, v_cache, k_scale, v_scale, page_table, num_computed_tokens, query_lens, scale = args
    (B, Q, H, D), (pages, P, G, _) = q.shape, k_cache.shape
    if Q > MOST_ROWS:
        k, v = _dequantised(args, page_table)
        own = torch.arange(k.shape[0], dtype=page_table.dtype, device=q.device).view(page_table.shape)
        operands = PagedAttention(q, k, v, own, num_computed_tokens, query_lens, scale)
        return over_pages_on_npu(operands)
    lengths, table = num_computed_tokens + 1, page_table
    if Q > 1:
        token = torch.arange(1, Q + 1, dtype=num_computed_tokens.dtype, device=q.device)
        lengths = (num_computed_tokens[:, None] + token[None, :]).view(B * Q)
        # Invalid queries at the end of a full context have keys beyond the table; the kernel finds the null page for them.
        longer = torch.cat([page_table, page_table.new_zeros(B, -(-(Q - 1) // P))], 1)
        table = longer[:, None, :].expand(B, Q, longer.shape[1]).reshape(B * Q, longer.shape[1])
    static = k_scale.dim() == 2
    mode = _PER_CHANNEL if static else _PER_TOKEN_AND_HEAD_IN_PAGES
    k_factor, v_factor = (x.to(q.dtype).view(1, G * D) if static else x for x in (k_scale, v_scale))
    out, _ = torch.ops.air.npu_fused_infer_attention_score(
        q.view(B * Q, 1, H * D),
        k_cache.view(pages, P, G * D),
        v_cache.view(pages, P, G * D),
        block_table=table,
        actual_seq_lengths_kv=lengths.to(torch.int64),
        key_antiquant_scale=k_factor,
        value_antiquant_scale=v_factor,
        key_antiquant_mode=mode,
        value_antiquant_mode=mode,
        num_heads=H,
        num_key_value_heads=G,
        scale=scale,
        input_layout=NPU_LAYOUT,
        block_size=P,
    )
    return out.view(B, Q, H, D)


def _cost(args: QuantPagedAttention) -> Cost:
    q, k_cache, _, k_scale, _, page_table, num_computed_tokens, query_lens, _ = args
    G, D = k_cache.shape[2:]
    keys = page_table.shape[1] * k_cache.shape[1]
    kv = 2 * q.shape[0] * keys * G * (D + (4 if k_scale.dim() == 3 else 0))
    return Cost(4 * q.numel() * keys, nbytes(q, page_table, num_computed_tokens, query_lens) + kv, nbytes(q))


for _primitive in _BOTH:
    _primitive.abstract(_abstract)
    _primitive.reference(quant_paged_attention_reference)
    _primitive.lowering("inductor")(_cpu)
    _primitive.lowering("npu")(_npu)
    _primitive.cost(_cost)
