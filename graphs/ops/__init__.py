"""The primitive table, one file a primitive."""

from .accept import accept
from .add_rms_norm import add_rms_norm
from .adjust_logits import adjust_logits
from .attention_heads import attention_heads
from .behind import behind
from .cache_write import cache_write
from .causal_conv import causal_conv
from .chunk_gated_delta import chunk_gated_delta
from .delta_gates import delta_gates
from .delta_heads import delta_heads
from .delta_split import delta_split
from .embed import embed
from .fused_experts import fused_experts_w4a8
from .gated_delta import gated_delta
from .gated_rms_norm import gated_rms_norm
from .gelu import gelu
from .grouped_experts import grouped_experts
from .head_linear import head_linear
from .l2_norm import l2_norm
from .last_rows import last_rows
from .layer_norm import layer_norm
from .linear import linear
from .mask_logits import mask_logits
from .mla_attention import mla_attention
from .moe_exchange import moe_combine, moe_dispatch
from .moe_experts import moe_experts
from .moe_route import moe_route
from .moe_route_grouped import moe_route_grouped
from .moe_sort import moe_sort, moe_unsort
from .packed_latents import packed_latent_write
from .paged_attention import paged_attention
from .paged_write import paged_write
from .picture_places import picture_places
from .positions import positions, slot_mapping
from .quant_cache_write import quant_cache_write, static_cache_write
from .quant_experts import grouped_experts_w4a8, grouped_experts_w8a8
from .quant_linear import quant_linear
from .quant_linear_biased import quant_linear_biased
from .quant_linear_w4a8 import quant_linear_w4a8
from .quant_paged_attention import quant_paged_attention, static_quant_paged_attention
from .quant_paged_write import quant_paged_write
from .quant_sparse_attention import quant_sparse_attention
from .quant_sparse_index import quant_sparse_index
from .request_slot_write import request_slot_write
from .rms_norm import rms_norm
from .rope import rope, rope_angles, scaled_rope_angles
from .sample import sample
from .segment_attention import segment_attention
from .sparse_attention import sparse_attention
from .sparse_index import sparse_index
from .static_quant_linear import static_quant_linear
from .swiglu import swiglu
from .swiglu_linear import swiglu_linear
from .token_logprobs import token_logprobs
from .weight_quant_experts import grouped_experts_w4a16
from .weight_quant_linear import weight_quant_linear

__all__ = [
    "accept",
    "add_rms_norm",
    "adjust_logits",
    "attention_heads",
    "behind",
    "cache_write",
    "causal_conv",
    "chunk_gated_delta",
    "delta_gates",
    "delta_heads",
    "delta_split",
    "embed",
    "fused_experts_w4a8",
    "gated_delta",
    "gated_rms_norm",
    "gelu",
    "grouped_experts",
    "grouped_experts_w4a8",
    "grouped_experts_w4a16",
    "grouped_experts_w8a8",
    "head_linear",
    "l2_norm",
    "last_rows",
    "layer_norm",
    "linear",
    "mask_logits",
    "mla_attention",
    "moe_combine",
    "moe_dispatch",
    "moe_experts",
    "moe_route",
    "moe_route_grouped",
    "moe_sort",
    "moe_unsort",
    "packed_latent_write",
    "paged_attention",
    "paged_write",
    "picture_places",
    "positions",
    "quant_cache_write",
    "quant_linear",
    "quant_linear_biased",
    "quant_linear_w4a8",
    "quant_paged_attention",
    "quant_paged_write",
    "quant_sparse_attention",
    "quant_sparse_index",
    "request_slot_write",
    "rms_norm",
    "rope",
    "rope_angles",
    "sample",
    "scaled_rope_angles",
    "segment_attention",
    "slot_mapping",
    "sparse_attention",
    "sparse_index",
    "static_cache_write",
    "static_quant_linear",
    "static_quant_paged_attention",
    "swiglu",
    "swiglu_linear",
    "token_logprobs",
    "weight_quant_linear",
]
