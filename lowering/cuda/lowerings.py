"""Lowerings of primitives for GPUs: aten operators whose shapes depend on no value. All other primitives run as their references."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...graphs.ops.mla_attention import mla_attention
from ...graphs.ops.moe_experts import moe_experts, moe_experts_static
from ...graphs.ops.paged_attention import PagedAttention, attend, paged_attention
from ...graphs.ops.quant_paged_attention import quant_paged_attention, static_quant_paged_attention
from ...graphs.ops.sample import sample
from ...graphs.ops.token_logprobs import token_logprobs
from ...graphs.primitive import Primitive

KIND = "inductor_cuda"

_AS_ON_CPU: tuple[Primitive[Any], ...] = (mla_attention, quant_paged_attention, static_quant_paged_attention)
"""Their lowerings for CPUs are aten operators."""

_AS_ON_NPU: tuple[Primitive[Any], ...] = (sample, token_logprobs)
"""Their lowerings for NPUs are aten operators, every row alike; those for CPUs are kernels that look at values."""


def _share(primitive: Primitive[Any], kind: str) -> None:
    rule = primitive.lower_for(kind)
    primitive.lowering(KIND)(lambda args: rule(*args))


for _primitive in _AS_ON_CPU:
    _share(_primitive, "inductor")
for _primitive in _AS_ON_NPU:
    _share(_primitive, "npu")
moe_experts.lowering(KIND)(moe_experts_static)


@paged_attention.lowering(KIND)
def over_all_pages(args: PagedAttention) -> Tensor:
    """Over the whole page table: a captured graph cannot depend on the values of lengths, so every step reads the longest context."""
    q, k_cache, v_cache, page_table, num_computed_tokens, query_lens, scale = args
    pages, rows = page_table.reshape(-1), page_table.shape[0]
    keys, values = (cache.index_select(0, pages).view(rows, -1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    return attend(q, keys, values, num_computed_tokens, query_lens, scale)
